"""The knobs of the worlds that come with Holdfast: one frozen branch for each, chosen by its name."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator

from holdfast.values import Count, Span


class Knobs(BaseModel):
    """A branch of the tree of knobs: frozen, and nothing in it that is not known."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


class WorldKnobs(Knobs):
    """What every world has."""

    crowd: ClassVar[int] = 1
    """Agents come in multiples of this."""
    name: str = Field(description="which world")
    agents: Count = Field(default=64, ge=1, description="agents that live in parallel")

    @field_validator("name")
    @classmethod
    def _own_name(cls, name: str) -> str:
        """Refuse the name of another world."""
        own = cls.model_fields["name"]
        if not own.is_required() and name != own.default:
            raise ValueError(f"these are the knobs of {own.default}")
        return name


class _Cut(WorldKnobs):
    truncate: bool = Field(default=False, description="end episodes by truncation, not termination")


class RecallWorld(_Cut):
    """Name a cue after a delay; without memory it cannot be solved."""

    name: str = Field(default="recall", description="which world")
    delay: Span = Field(
        default=8, description="empty steps between cue and query; 4..24 draws one each episode"
    )
    cues: Count = Field(default=4, ge=2, le=100, description="how many cues there are to tell apart")


class RepeatFirstWorld(_Cut):
    """Name the first symbol at every step; nothing marks where an episode begins."""

    name: str = Field(default="repeat_first", description="which world")
    symbols: Count = Field(default=4, ge=2, le=100, description="how many symbols there are")
    length: Span = Field(default=(65, 95), description="steps of an episode; 65..95 draws it each time")


class NBackWorld(_Cut):
    """Name the symbol of some steps ago, at every step."""

    name: str = Field(default="n_back", description="which world")
    back: Count = Field(default=2, ge=1, description="how many steps ago")
    symbols: Count = Field(default=4, ge=2, le=100, description="how many symbols there are")
    length: Count = Field(default=32, ge=2, description="steps of an episode")


class TMazeWorld(WorldKnobs):
    """Walk through a corridor into the arm that was told at its start."""

    name: str = Field(default="tmaze", description="which world")
    corridor: Count = Field(default=4, ge=1, description="cells from the start to the junction")
    limit: Count = Field(default=20, ge=1, description="steps after which staying away costs 1")


class KeyValueWorld(_Cut):
    """Remember the value of each key, and say it when the key is asked."""

    name: str = Field(default="key_value", description="which world")
    pairs: Count = Field(default=4, ge=1, description="keys to remember")
    values: Count = Field(default=4, ge=2, description="values a key may have")


class ParityWorld(_Cut):
    """Say the parity of all bits seen so far, at every step."""

    name: str = Field(default="parity", description="which world")
    length: Count = Field(default=16, ge=2, description="steps of an episode")


class ForageWorld(WorldKnobs):
    """Find a goal that stays hidden in the same arm for several trials."""

    name: str = Field(default="forage", description="which world")
    arms: Count = Field(default=4, ge=2, le=4, description="arms around the hub")
    reach: Count = Field(default=2, ge=1, description="cells of an arm")
    trials: Count = Field(default=8, ge=1, description="trials of an episode")


class ArenaWorld(_Cut):
    """Crowds of 24 collect what regrows; the world of throughput."""

    crowd: ClassVar[int] = 24
    name: str = Field(default="arena", description="which world")
    agents: Count = Field(default=96, ge=24, multiple_of=24, description="agents that live in parallel")
    size: Count = Field(default=32, ge=1, description="rows and columns of a map")
    walls: Count = Field(default=20, ge=0, description="percent of cells that are walls")
    resources: Count = Field(default=20, ge=0, description="percent of cells where something grows")
    regrow: Count = Field(default=50, ge=1, description="steps until it is ripe again")
    length: Count = Field(default=500, ge=1, description="steps of an episode")
    sight: Count = Field(default=200, ge=1, description="tokens an agent sees at most")


class RaggedWorld(_Cut):
    """As recall, with agents that leave and come back at different steps."""

    name: str = Field(default="ragged", description="which world")
    delay: Span = Field(default=(0, 8), description="empty steps between cue and query")
    absent: Span = Field(default=(1, 8), description="steps an agent is away between episodes")
    cues: Count = Field(default=4, ge=2, le=100, description="how many cues there are to tell apart")


class ConstantWorld(_Cut):
    """Every step pays 1: what a value must be is known exactly."""

    name: str = Field(default="constant", description="which world")
    length: Count = Field(default=20, ge=1, description="steps of an episode")


WORLD_KNOBS: dict[str, type[WorldKnobs]] = {
    kind.model_fields["name"].default: kind
    for kind in (
        RecallWorld,
        RepeatFirstWorld,
        NBackWorld,
        TMazeWorld,
        KeyValueWorld,
        ParityWorld,
        ForageWorld,
        ArenaWorld,
        RaggedWorld,
        ConstantWorld,
    )
}
"""The knobs of each world that comes with Holdfast."""
