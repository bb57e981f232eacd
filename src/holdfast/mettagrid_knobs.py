"""The knobs of mettagrid's worlds: those of our games, and of configurations of yours."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from holdfast.knobs import WorldKnobs
from holdfast.values import Count, Names, plain

METTAGRID = "mettagrid:"


class _Simulated(WorldKnobs):
    agent_id: bool = Field(default=False, description="show agents their numbers")


class MettaGridKnobs(_Simulated):
    """A configuration of mettagrid: mettagrid:package.module:function."""

    name: str = Field(description="which world")
    options: Annotated[dict[str, Any], BeforeValidator(plain)] = Field(
        default={}, description="what the function is called with, as in '{size: 5}'"
    )


class MettaGridTMaze(_Simulated):
    """As tmaze, built of altars, in the engine of mettagrid."""

    crowd: ClassVar[int] = 8
    name: str = Field(default="mettagrid:tmaze", description="which world")
    corridor: Count = Field(default=4, ge=1, description="cells from the start to the junction")
    limit: Count = Field(default=16, ge=1, description="steps of an episode")
    mazes: Count = Field(default=8, ge=1, le=250, description="mazes on a map, an agent each")
    resources: Names = Field(default=(), description="further resources, which nobody has")


class MettaGridCollect(_Simulated):
    """Crowds of 24 use altars, each of which gives once, in the engine of mettagrid."""

    crowd: ClassVar[int] = 24
    name: str = Field(default="mettagrid:collect", description="which world")
    agents: Count = Field(default=96, ge=24, multiple_of=24, description="agents that live in parallel")
    limit: Count = Field(default=50, ge=1, description="steps of an episode")
    resources: Names = Field(default=(), description="further resources, which nobody has")


METTAGRID_KNOBS: dict[str, type[WorldKnobs]] = {
    kind.model_fields["name"].default: kind for kind in (MettaGridTMaze, MettaGridCollect)
}
"""The knobs of our games."""
