"""Step, WorldSpec, and the protocols of worlds: World, AsyncWorld (send/recv), Restorable and others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from holdfast.cuda_graphs import is_recording
from holdfast.errors import AgentCountError, ContractError
from holdfast.types import Bool, Float, Int, Shaped, Tensor

Obs = Shaped[Tensor, "..."] | TensorDictBase
"""An observation: a tensor, or for Dict and Tuple spaces a TensorDict, nested as they are.

Subspaces of a Dict go by their keys, those of a Tuple by their indices: `obs["image"]`, `obs["0"]`.
"""
Device = str | torch.device


@dataclass(frozen=True)
class Step:
    """One timestep of all agents.

    `reward`, `terminated` and `truncated` come with `obs` and belong to the action before it; `first` is true where
    `obs` starts an episode. Autoreset is same-step: the row of a finished episode already shows the next one, and the
    final observation of a truncated one is in `last_obs`.
    """

    obs: Obs
    reward: Float[Tensor, " A"]
    terminated: Bool[Tensor, " A"]
    truncated: Bool[Tensor, " A"]
    first: Bool[Tensor, " A"]
    valid: Bool[Tensor, " A"]
    """False where no agent acts: memory is unchanged and the row has no weight."""
    trial: Bool[Tensor, " A"]
    """True where a new trial starts inside an episode."""
    last_obs: Obs | None = None
    """The final observation, read only in rows where `truncated`."""


@dataclass(frozen=True)
class Feature:
    """A token feature: its name, and the scale that its values are divided by."""

    name: str
    normalization: float
    id: int | None = None
    """Its id in the tokens of this world; None: its index in the list."""


@dataclass(frozen=True)
class WorldSpec:
    """What a policy must know to be built for a world."""

    obs_shape: tuple[int, ...]
    action_names: tuple[str, ...]
    features: tuple[Feature, ...] = ()
    """The token features."""
    window: tuple[int, int] = (11, 11)
    """Rows and columns of the egocentric window that token locations refer to."""
    truncates: Literal["never", "always"] = "never"
    """When `truncated` can be set, so that the host need not read it from the device."""
    best_return: float | None = None
    """The best possible mean return."""
    best_return_without_memory: float | None = None
    """The best possible mean return of a policy without memory."""
    observation: spaces.Space[Any] | None = None
    """The observation space. None: tokens if there are `features`, else a Box of `obs_shape`."""
    action: spaces.MultiDiscrete | spaces.Box | None = None
    """The action space. None: one of `action_names`. Actions of a Box lie within its bounds."""
    name: str = ""
    """The name in error messages; empty: the class name."""
    parts: tuple[tuple[str, int], ...] = ()
    """The worlds of a mixture with their numbers of agents, in the order of their rows."""
    agents_per_env: int = 1
    """Agents that share an environment: rows 0 to agents_per_env - 1, and so on."""

    @cached_property
    def observation_space(self) -> spaces.Space[Any]:
        """The observation space; a Box without bounds by default."""
        if self.observation is not None:
            return self.observation
        if self.features:
            return spaces.Box(0, 255, self.obs_shape, np.uint8)
        return spaces.Box(-np.inf, np.inf, self.obs_shape, np.float32)

    def __post_init__(self) -> None:
        """Check names, features and spaces."""
        for feature in self.features:
            if not isinstance(feature, Feature):
                raise ContractError(f"features has {feature!r}; write Feature({str(feature)!r}, normalization).")
            if not 0 < feature.normalization < np.inf:
                raise ContractError(
                    f"The feature {feature.name} has normalization {feature.normalization}; give a scale above 0."
                )
        _check_observation(self)
        check_action_space(self.action, self.action_names)
        for what, words in (
            ("action", self.action_names),
            ("feature", [feature.name for feature in self.features]),
            ("feature id", self.feature_ids),
        ):
            duplicates = sorted({str(word) for word in words if list(words).count(word) > 1})
            if duplicates:
                raise ContractError(f"The world has the {what} {', '.join(duplicates)} more than once.")
        if self.feature_ids and not 0 <= min(self.feature_ids) <= max(self.feature_ids) < 255:
            raise ContractError(
                f"{len(self.features)} features have ids up to {max(self.feature_ids)}; ids go from 0 to 254."
            )

    @property
    def interface(self) -> tuple[object, ...]:
        """All that a policy is bound to; a policy moves between equal interfaces without rebinding."""
        tokens = self.obs_shape, self.action_names, self.features, self.window
        return *tokens, self.observation, self.action

    @property
    def named_actions(self) -> tuple[str, ...]:
        """The actions that policies know by name; empty for an action space."""
        return self.action_names if self.action is None else ()

    @property
    def feature_ids(self) -> tuple[int, ...]:
        """The id of each feature in tokens."""
        return tuple(index if feature.id is None else feature.id for index, feature in enumerate(self.features))


@runtime_checkable
class World(Protocol):
    """A vectorized environment: a batch of agents, one `Step` and one action each at a time."""

    agents: int
    spec: WorldSpec

    def reset(self) -> Step:
        """Start every agent's first episode; `first` is true everywhere."""
        ...

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Take one action per agent, `[A]` or `[A,n]`; finished episodes restart within this call."""
        ...


@runtime_checkable
class Closeable(Protocol):
    """A world with resources to release."""

    def close(self) -> None:
        """Release them."""


@dataclass(frozen=True)
class Restarted:
    """The agents that could not be restored and start a new episode."""

    mask: Bool[Tensor, " A"]
    step: Step
    """A step of all agents; only the rows in `mask` are read."""
    reason: str
    """The reason, for the log."""


@runtime_checkable
class Restorable(Protocol):
    """A world whose state can be saved and restored."""

    def state(self) -> dict[str, Any] | None:
        """Return a copy of all state that decides what comes next, or None if that is impossible.

        It is a plain tree: dicts with string keys, lists, tensors, numpy arrays, numbers, strings and None.
        """

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Restore a saved state; return the agents that had to restart, or None."""
        ...


@dataclass(frozen=True)
class GridView:
    """The grids of all environments as they are now, to be drawn."""

    kinds: tuple[str, ...]
    """What a cell can be: `("floor", "wall", "resource")`."""
    cells: Int[Tensor, "E R C"]
    """The grid of each environment: indices into `kinds`."""
    agents: Int[Tensor, "A 2"]
    """Row and column of each agent in the grid of its environment; -1 where it has left."""


@runtime_checkable
class Drawable(Protocol):
    """A world on grids, which replays and the live page draw."""

    def grid_view(self) -> GridView:
        """Return the grids and the agents on them."""
        ...


@runtime_checkable
class Rendering(Protocol):
    """A world whose environments may render frames."""

    render_modes: tuple[str, ...]
    """The modes that the environments offer; `rgb_array` is that of frames."""

    def render_frame(self, agent: int) -> np.ndarray | None:
        """Return the frame `[height, width, 3]`, uint8, of an agent's environment; None: it was made without."""
        ...


def check_agent_count(name: str, agents: int, agents_per_env: int) -> None:
    """Require whole environments."""
    if agents < 1 or agents % agents_per_env:
        fewer = agents // agents_per_env * agents_per_env
        options = f"{fewer} or {fewer + agents_per_env}" if fewer > 0 else f"{agents_per_env}"
        raise AgentCountError(
            f"{name} has {agents_per_env} agents per environment; world.agents={agents} is not a multiple of "
            f"{agents_per_env}; try {options}.",
            agents_per_env,
        )


ALL = slice(None)
"""All rows."""


def as_array(tensor: Tensor) -> Any:
    """Return a tensor on the CPU as an array that shares its memory, any other as it is.

    NumPy has a quarter of torch's overhead for a few numbers, and the same operators. It has no bfloat16, which
    becomes a copy in float32.
    """
    if not tensor.is_cpu or is_recording():
        return tensor
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)


def array_module(tensor: Tensor) -> Any:
    """Return the module whose `where` and `stack` take what `as_array` returns: numpy or torch."""
    return np if tensor.is_cpu and not is_recording() else torch


def latest(mask: Bool[Tensor, "A L"], at_start: Bool[Tensor, " A"]) -> Int[Tensor, "A L1"]:
    """Number of the latest step up to each one where the mask is true, counted from 1, and -1 before the first.

    The first column is before step 1: 0 where `at_start` is true.
    """
    # Time first: along the last axis a GPU takes ten times as long.
    numbers = torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)[:, None]
    steps = torch.where(mask.t().contiguous(), numbers, -1)
    start = at_start.int()[None] - 1
    return torch.cat([start, steps]).cummax(0).values.t()


@dataclass(frozen=True)
class PartialStep:
    """A step of some agents, which need an action next."""

    rows: Int[Tensor, " N"]
    """The agents, without duplicates; on the CPU."""
    step: Step
    """Their step, `[N,...]`, in the order of `rows`."""


@runtime_checkable
class AsyncWorld(World, Protocol):
    """A world that steps some agents while the policy acts for others.

    After `reset()` and after `step()` all agents need an action. `send()` starts the steps of some of them,
    and `recv()` returns the steps that are done. `step(actions)` does both for all agents.
    """

    groups: tuple[Int[Tensor, " _"], ...]
    """Partition of the agents into groups to send together while all of them need an action."""

    def send(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Start the steps of some agents, without waiting."""

    def recv(self) -> PartialStep:
        """Wait for the steps of some of the agents that were sent."""
        ...


@runtime_checkable
class Shardable(Protocol):
    """A world that can be one shard of a larger one, with the same episodes per agent."""

    def set_agent_offset(self, first_agent: int) -> None:
        """Number the agents from `first_agent` on; call it before `reset()`."""


def as_slice(rows: Int[Tensor, " N"], device: torch.device) -> slice | Tensor:
    """Return consecutive rows as a slice, which makes views, others as an index on the device."""
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows.to(device)


def select(step: Step, rows: Int[Tensor, " N"]) -> Step:
    """Return some rows of a step, in this order."""
    index = as_slice(rows, step.reward.device)
    return _map_fields(step, lambda value: value[index])


def concat(parts: list[PartialStep]) -> Step:
    """Concatenate partial steps that have every agent once, in the order of the agents, as a copy."""
    rows = torch.cat([part.rows for part in parts])
    order = as_slice(rows.argsort(), parts[0].step.reward.device)
    values = dict[str, Any]()
    for name, value in vars(parts[0].step).items():
        values[name] = None if value is None else torch.cat([vars(part.step)[name] for part in parts])[order]
    return Step(**values)


def to_device(step: Step, device: torch.device) -> Step:
    """Move a step to a device."""
    return step if step.reward.device == device else _map_fields(step, lambda value: value.to(device))


def _map_fields(step: Step, function: Callable[[Any], Any]) -> Step:
    return replace(step, **{name: function(value) for name, value in vars(step).items() if value is not None})


def _check_observation(spec: WorldSpec) -> None:
    """Require an observation space that agrees with the rest of the spec."""
    space, shape = spec.observation, tuple(spec.obs_shape)
    if space is None:
        return
    if spec.features:
        raise ContractError(f"The world has features, so it has tokens, and observation={space}; leave out one.")
    space_shape = () if isinstance(space, spaces.Dict | spaces.Tuple) else space.shape
    if space_shape is not None and space_shape != shape:
        raise ContractError(
            f"obs_shape is {shape}, but observation={space} has the shape {space_shape}; write obs_shape={space_shape}."
        )


def check_action_space(space: spaces.Space[Any] | None, names: tuple[str, ...]) -> None:
    """Require an action space that policies support."""
    if space is None:
        if not names:
            raise ContractError("The world has no actions; set action_names, or action=MultiDiscrete or Box.")
        return
    if isinstance(space, spaces.Discrete):
        raise ContractError(f"action={space}: for discrete actions set action_names, one name per action.")
    if not isinstance(space, spaces.MultiDiscrete | spaces.Box):
        raise ContractError(f"action={space}: an action space is MultiDiscrete or Box.")
    if len(space.shape) != 1 or not space.shape[0]:
        raise ContractError(f"action={space} has the shape {space.shape}; write it flat, with at least one entry.")
    if isinstance(space, spaces.MultiDiscrete) and bool((space.start != 0).any()):
        raise ContractError(f"action={space}: actions count from 0; leave out start and add it in the world.")
    if isinstance(space, spaces.Box) and space.dtype.kind != "f":
        raise ContractError(f"action={space}: a Box of actions must be floating-point; use MultiDiscrete for integers.")
    if names and len(names) != space.shape[0]:
        raise ContractError(
            f"There are {len(names)} action_names for the {space.shape[0]} entries of action={space}; name all or none."
        )
