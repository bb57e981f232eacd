"""What the world says: the one clock of episodes, and the contract every world keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from gymnasium import spaces

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Float, Shaped, Tensor
from holdfast.worlds.seen import Seen, check_action_space, check_observation

Truncates = Literal["never", "always"]


@dataclass(frozen=True)
class Step:
    """What the world said to every agent at once.

    `reward`, `terminated` and `truncated` came with `obs` and judge the action before it; `first` is
    true where `obs` opens an episode. Worlds restart in the same step, so a finished episode's row
    already shows the next one; what was last seen of a truncated one is in `last_obs`.
    """

    obs: Seen
    reward: Float[Tensor, " A"]
    terminated: Bool[Tensor, " A"]
    truncated: Bool[Tensor, " A"]
    first: Bool[Tensor, " A"]
    valid: Bool[Tensor, " A"]
    """False where nobody acts: memory stands still and the row weighs nothing."""
    trial: Bool[Tensor, " A"]
    """True where a new trial opens inside an episode."""
    last_obs: Seen | None = None
    """The true last observation, read only in rows where `truncated`."""


@dataclass(frozen=True)
class Feature:
    """One kind of token: its name, and the size its values are divided by."""

    name: str
    normalization: float
    id: int | None = None
    """What tokens call it in this world; none: its place in the list."""


@dataclass(frozen=True)
class WorldSpec:
    """What a policy must know to be built for a world."""

    obs_shape: tuple[int, ...]
    action_names: tuple[str, ...]
    features: tuple[Feature, ...] = ()
    """The token features there are."""
    window: tuple[int, int] = (11, 11)
    """Rows and columns of the egocentric window that token locations point into."""
    truncates: Truncates = "never"
    """When `truncated` can be set, so that nobody has to look at the device to know."""
    best_return: float | None = None
    """The best mean return there is."""
    best_return_without_memory: float | None = None
    """The best mean return of a policy that sees only the present observation."""
    observation: spaces.Space[Any] | None = None
    """What is seen. None: tokens where there are `features`, else numbers of `obs_shape`."""
    action: spaces.MultiDiscrete | spaces.Box | None = None
    """What is done. None: one of `action_names`. In a Box it is a raw sample; the world clips it."""
    name: str = ""
    """What errors call the world; none: its class."""
    parts: tuple[tuple[str, int], ...] = ()
    """The worlds of a mixture, each with how many agents live in it, in the order of their rows."""
    crowd: int = 1
    """Agents that share a place and may feel each other: rows 0 to crowd - 1, and so on."""

    @cached_property
    def sight(self) -> spaces.Space[Any]:
        """What is seen, as a space: numbers without bounds where the world says no more."""
        if self.observation is not None:
            return self.observation
        if self.features:
            return spaces.Box(0, 255, self.obs_shape, np.uint8)
        return spaces.Box(-np.inf, np.inf, self.obs_shape, np.float32)

    def __post_init__(self) -> None:
        """Refuse words that mean two things, and spaces that say something else."""
        for feature in self.features:
            if not isinstance(feature, Feature):
                raise ContractError(
                    f"features has {feature!r}; write Feature({str(feature)!r}, normalization)."
                )
        check_observation(self.observation, self.obs_shape, bool(self.features))
        check_action_space(self.action, self.action_names)
        for what, words in (
            ("action", self.action_names),
            ("feature", [feature.name for feature in self.features]),
            ("feature id", self.feature_ids),
        ):
            twice = sorted({str(word) for word in words if list(words).count(word) > 1})
            if twice:
                raise ContractError(f"The world has the {what} {', '.join(twice)} more than once.")
        for feature in self.features:
            if not 0 < feature.normalization < np.inf:
                raise ContractError(
                    f"The feature {feature.name} has normalization {feature.normalization}; give the size "
                    "its values have, above 0."
                )
        if self.feature_ids and not 0 <= min(self.feature_ids) <= max(self.feature_ids) < 255:
            raise ContractError(
                f"The world has {len(self.features)} features with ids up to {max(self.feature_ids)}; "
                "ids go from 0 to 254."
            )

    @property
    def words(self) -> tuple[object, ...]:
        """All that a policy is bound to: worlds with the same words need no translation."""
        own = self.obs_shape, self.action_names, self.features, self.window
        return *own, self.observation, self.action

    @property
    def choices(self) -> tuple[str, ...]:
        """The actions that policies know by name: none where they are no choice of one."""
        return self.action_names if self.action is None else ()

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """What tokens call each feature."""
        return tuple(
            place if feature.id is None else feature.id for place, feature in enumerate(self.features)
        )


@runtime_checkable
class World(Protocol):
    """A batch of agents that are told a `Step` and answer with one action each."""

    agents: int
    spec: WorldSpec

    def reset(self) -> Step:
        """Start every agent's first episode; `first` is true everywhere."""
        ...

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Take an action an agent, `[A]` or `[A,n]`; finished episodes restart within this call."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A world that holds something open."""

    def close(self) -> None:
        """Let go of it."""
        ...


@dataclass(frozen=True)
class Anew:
    """Who could not be put back to where they were, and had to begin a new episode."""

    who: Bool[Tensor, " A"]
    step: Step
    """What everybody sees; only the rows in `who` are read."""
    why: str
    """The reason, in words."""


@runtime_checkable
class Keeps(Protocol):
    """A world that can say where it is, and be put back there."""

    def state(self) -> dict[str, Any] | None:
        """Give all that decides what comes next, as copies that do not change when the world goes on.

        It is a plain tree: dicts with words as keys, lists, tensors, numpy arrays, numbers, words and None.
        None in its place: this one cannot say where it is after all.
        """
        ...

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Go on from there, whatever was before; tell who had to begin anew instead. None: nobody."""
        ...


def check_actions(actions: Tensor, agents: int, wanted: int | spaces.MultiDiscrete | spaces.Box) -> None:
    """Refuse actions of the wrong shape, type or (where looking costs nothing: on the CPU) size.

    `wanted` is the number of discrete actions, or the action space of the world's spec. Fractions
    outside of their box are no error: a policy hands out raw samples, and the world clips them.
    """
    shape = (agents,) if isinstance(wanted, int) else (agents, *wanted.shape)
    fractions = isinstance(wanted, spaces.Box)
    if actions.shape != shape or actions.is_floating_point() != fractions:
        what = (
            f"{agents} whole numbers below {wanted}"
            if isinstance(wanted, int)
            else f"{'fractions' if fractions else 'whole numbers'} {shape} for {wanted}"
        )
        raise ContractError(
            f"actions are {tuple(actions.shape)} {actions.dtype}; this world has {agents} agents "
            f"and wants {what}."
        )
    if actions.device.type == "cpu":
        _check_sizes(actions, wanted)


def _check_sizes(actions: Tensor, wanted: int | spaces.MultiDiscrete | spaces.Box) -> None:
    if isinstance(wanted, spaces.Box):
        bad, said = ~actions.isfinite(), "must be finite"
    else:
        count = torch.as_tensor(wanted if isinstance(wanted, int) else wanted.nvec)
        bad = (actions < 0) | (actions >= count)
        said = f"there are actions 0 to {(count - 1).tolist()}"
    if bool(bad.any()):
        agent = int(bad.nonzero()[0, 0])
        raise ContractError(f"agent {agent} took action {actions[agent].tolist()}; {said}.")
