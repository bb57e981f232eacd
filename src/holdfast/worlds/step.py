"""What the world says: the one clock of episodes, and the contract every world keeps."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Float, Int, Shaped, Tensor

Truncates = Literal["never", "always"]


@dataclass(frozen=True)
class Step:
    """What the world said to every agent at once.

    `reward`, `terminated` and `truncated` came with `obs` and judge the action before it; `first` is
    true where `obs` opens an episode. Worlds restart in the same step, so a finished episode's row
    already shows the next one; what was last seen of a truncated one is in `last_obs`.
    """

    obs: Shaped[Tensor, "A ..."]
    reward: Float[Tensor, " A"]
    terminated: Bool[Tensor, " A"]
    truncated: Bool[Tensor, " A"]
    first: Bool[Tensor, " A"]
    valid: Bool[Tensor, " A"]
    """False where nobody acts: memory stands still and the row weighs nothing."""
    trial: Bool[Tensor, " A"]
    """True where a new trial opens inside an episode."""
    last_obs: Shaped[Tensor, "A ..."] | None = None
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

    def __post_init__(self) -> None:
        """Refuse words that mean two things."""
        for what, words in (
            ("action", self.action_names),
            ("feature", [feature.name for feature in self.features]),
            ("feature id", self.feature_ids),
        ):
            twice = sorted({str(word) for word in words if list(words).count(word) > 1})
            if twice:
                raise ContractError(f"The world has the {what} {', '.join(twice)} more than once.")
        if self.feature_ids and not 0 <= min(self.feature_ids) <= max(self.feature_ids) < 255:
            raise ContractError(
                f"The world has {len(self.features)} features with ids up to {max(self.feature_ids)}; "
                "ids go from 0 to 254."
            )

    @property
    def words(self) -> tuple[object, ...]:
        """All that a policy is bound to: worlds with the same words need no translation."""
        return self.obs_shape, self.action_names, self.features, self.window

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

    def step(self, actions: Int[Tensor, " A"]) -> Step:
        """Take one action an agent; finished episodes restart within this call."""
        ...


def check_actions(actions: Tensor, agents: int, num_actions: int) -> None:
    """Refuse actions of the wrong shape, type or (where looking costs nothing: on the CPU) size."""
    if actions.shape != (agents,) or actions.is_floating_point():
        raise ContractError(
            f"actions are {tuple(actions.shape)} {actions.dtype}; this world has {agents} agents "
            f"and wants {agents} whole numbers below {num_actions}."
        )
    if actions.device.type == "cpu" and bool(((actions < 0) | (actions >= num_actions)).any()):
        bad = ((actions < 0) | (actions >= num_actions)).nonzero()[0, 0]
        raise ContractError(
            f"agent {int(bad)} took action {int(actions[bad])}; there are actions 0 to {num_actions - 1}."
        )
