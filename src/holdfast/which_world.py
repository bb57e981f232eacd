"""Which world is meant by a name, and its knobs: one of ours, a Gymnasium one, yours, or several."""

import inspect
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import gymnasium
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, create_model, field_validator

from holdfast.errors import ConfigError, did_you_mean
from holdfast.knobs import WORLD_KNOBS, Knobs, WorldKnobs
from holdfast.mettagrid_knobs import METTAGRID, METTAGRID_KNOBS, MettaGridKnobs
from holdfast.named import find_named
from holdfast.values import Count, Names, Numbers, first_complaint, optional, plain, several_named

GYM, POPGYM, MIXTURE = "gym:", "popgym:", "mixture"
PETTINGZOO, ENVPOOL = "pettingzoo:", "envpool:"
RESERVED = ("agents", "seed", "device", "name", "crowd")
"""What every world is told besides its own options, and words that mean something here."""
TYPED = (bool, int, float, str, tuple, list, dict)
PLAIN = (*TYPED, NoneType)
"""What can be written down."""


class _Door(WorldKnobs):
    """What environments of other packages have in common."""

    name: str = Field(description="which world")
    options: Annotated[dict[str, Any], BeforeValidator(plain)] = Field(
        default={}, description="what the environment is made with, as in '{max_episode_steps: 200}'"
    )
    keep: Numbers = Field(default=(), description="which numbers of what is seen are shown; none: all")
    previous_action: bool = Field(default=False, description="show the action before, too")
    previous_reward: bool = Field(default=False, description="show the reward for it, too")
    tell_first: bool = Field(default=False, description="show where an episode begins, too")


class GymKnobs(_Door):
    """A Gymnasium environment: gym:ID, popgym:NAME, or package.module:Class."""

    vector: Literal["sync", "native"] = Field(
        default="sync", description="sync: made here, side by side; native: the id's own vector"
    )
    autoreset: Literal["auto", "same_step", "next_step", "disabled"] = Field(
        default="auto", description="when episodes restart; auto: same_step, or what a native vector does"
    )
    wrappers: Names = Field(default=(), description="package.module:Class,... around it, innermost first")


class PettingZooKnobs(_Door):
    """Parallel environments of PettingZoo, shared by several agents: MODULE or package.module:function."""

    wrappers: Names = Field(default=(), description="package.module:function,... around it, innermost first")


class EnvpoolKnobs(_Door):
    """An environment of envpool, which runs many in threads: envpool:ID."""

    vector: Literal["sync", "async"] = Field(
        default="sync", description="sync: all are answered at once; async: those who are done first"
    )
    batch: Count = Field(
        default=0, ge=0, description="async: how many are answered at once; 0: half of the agents"
    )
    threads: Count = Field(default=0, ge=0, description="threads they run in; 0: envpool decides")


class Part(Knobs):
    """A world among several, and how much it weighs."""

    world: "SomeWorld"
    weight: float = Field(default=1.0, gt=0)

    @field_validator("world")
    @classmethod
    def _one(cls, world: WorldKnobs) -> WorldKnobs:
        if isinstance(world, MixtureKnobs):
            raise ValueError("a mixture has no mixture inside; name all its worlds in one list")
        return world

    @property
    def label(self) -> str:
        """Name it by what differs from its defaults: `recall(delay=16)`."""
        own = self.world.model_dump(exclude={"name", "agents"}, exclude_defaults=True)
        said = ",".join(f"{key}={_written(self.world, key, value)}" for key, value in own.items())
        return f"{self.world.name}({said})" if said else self.world.name


class MixtureKnobs(WorldKnobs):
    """Several worlds at once; each has its share of the agents."""

    name: str = Field(default="mixture", description="which world")
    parts: "Parts" = Field(
        default=(), description="as in 'recall delay=8 weight=3 + n_back': agents are shared out by weight"
    )

    @field_validator("parts")
    @classmethod
    def _several(cls, parts: tuple[Part, ...]) -> tuple[Part, ...]:
        if not parts:
            raise ValueError("name the worlds, as in world.parts='recall weight=3 + n_back back=3'")
        return parts


DOORS: dict[str, type[WorldKnobs]] = {
    GYM: GymKnobs,
    POPGYM: GymKnobs,
    PETTINGZOO: PettingZooKnobs,
    ENVPOOL: EnvpoolKnobs,
}
"""The knobs of other packages' environments, by how their names begin."""
DOOR_NAMES = {"gym:ID": GymKnobs, "pettingzoo:MODULE": PettingZooKnobs, "envpool:ID": EnvpoolKnobs}
"""How such names are written, for people."""


def knobs_of(name: str) -> type[WorldKnobs]:
    """Find the knobs of a world by its name; a class of yours is imported to see what it takes."""
    if name in WORLD_KNOBS:
        return WORLD_KNOBS[name]
    if name == MIXTURE:
        return MixtureKnobs
    if name.startswith(METTAGRID) and name != METTAGRID:
        return METTAGRID_KNOBS.get(name, MettaGridKnobs)
    for door, knobs in DOORS.items():
        if name.startswith(door) and name != door:
            return knobs
    if ":" in name:
        return _knobs_of_yours(name)
    known = [*WORLD_KNOBS, MIXTURE]
    meant = did_you_mean(
        name, known, f"there is {', '.join([*known, *DOOR_NAMES])}, popgym:NAME, mettagrid:NAME."
    )
    raise ConfigError(
        f"world.name={name}: there is no such world; {meant} Your own goes by package.module:Class."
    )


@lru_cache
def _knobs_of_yours(name: str) -> type[WorldKnobs]:
    """Read the knobs of a class from what it is made with."""
    kind = find_named(name, "world.name=")
    if isinstance(kind, type) and issubclass(kind, gymnasium.Env | gymnasium.vector.VectorEnv):
        return GymKnobs
    thing = name.rpartition(":")[2]
    if not callable(kind):
        raise ConfigError(f"world.name={name}: {kind!r} is neither a class nor a function.")
    try:
        takes = inspect.signature(kind).parameters
    except ValueError:
        raise ConfigError(f"world.name={name}: {kind!r} does not say what it is made with.") from None
    if "agents" not in takes:
        raise ConfigError(
            f"world.name={name}: a world is made as {thing}(agents, *, seed, device, ...); "
            f"this one takes {', '.join(takes) or 'nothing'}."
        )
    fields: dict[str, Any] = {"name": (str, Field(default=name, description="which world"))}
    hints = _hints(kind)
    for key, each in takes.items():
        hidden = each.default is not each.empty and not isinstance(each.default, PLAIN)
        if key in RESERVED or hidden or each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            # What cannot be written down stays as the class has it.
            continue
        default = ... if each.default is each.empty else each.default
        hint = hints.get(key, type(each.default) if isinstance(each.default, TYPED) else None)
        fields[key] = (_type_of(hint), Field(default=default, description=f"what {name} says"))
    return create_model(f"{thing}Knobs", __base__=WorldKnobs, __doc__=kind.__doc__, **fields)


def _hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind.__init__ if isinstance(kind, type) else kind)
    except (NameError, TypeError):
        # What cannot be read is taken as it is written.
        return {}


def _type_of(hint: Any) -> Any:
    """Say how a word is read: by its type, and where that says nothing, as YAML."""
    kinds = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    if hint is int:
        return Count
    if str in kinds:
        return Annotated[hint, BeforeValidator(optional)] if NoneType in kinds else hint
    return Annotated[Any if hint is None else hint, BeforeValidator(plain)]


def _written(knobs: WorldKnobs, key: str, value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    between = ".." if type(knobs).model_fields[key].annotation == int | tuple[int, int] else ","
    return between.join(map(str, value))


def as_world(value: Any) -> Any:
    """Build the knobs of a world from a mapping with its name."""
    if not isinstance(value, dict) or "name" not in value:
        return value
    try:
        kind = knobs_of(str(value["name"]))
        for key in value.keys() - kind.model_fields.keys():
            meant = did_you_mean(key, kind.model_fields, f"it has {', '.join(kind.model_fields)}.")
            raise ConfigError(f"world.{key}: {value['name']} has no such key; {meant}")
        return kind.model_validate(value)
    except ValidationError as error:
        raise ValueError(first_complaint(error, "world.")) from None
    except ConfigError as error:
        raise ValueError(str(error)) from None


def as_parts(value: Any) -> Any:
    """Read worlds as they are typed: `NAME key=value weight=3 + NAME ...`."""
    if not isinstance(value, str):
        return value
    parts = []
    for name, keys in several_named(value, "recall delay=8 + n_back"):
        if "agents" in keys:
            raise ValueError("agents are shared out by weight; leave agents= out")
        weight = {"weight": keys.pop("weight")} if "weight" in keys else {}
        parts.append({"world": {"name": name, **keys}, **weight})
    return parts


SomeWorld = Annotated[SerializeAsAny[WorldKnobs], BeforeValidator(as_world)]
"""The branch of the world, by its name."""
Parts = Annotated[tuple[Part, ...], BeforeValidator(as_parts)]
"""Several worlds."""

Part.model_rebuild()
MixtureKnobs.model_rebuild()
