"""FAMILIES: the registry of worlds by name; the config of user worlds and mixtures."""

import inspect
import re
from difflib import get_close_matches
from functools import lru_cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import gymnasium
from pydantic import BeforeValidator, Field, SerializeAsAny, ValidationError, create_model, field_validator

from holdfast.config.base import ConfigBase, Int, first_error_message, parse_named_list, parse_optional, parse_yaml
from holdfast.config.worlds import EXTERNAL_CONFIGS, WORLD_CONFIGS, Family, GymConfig, WorldConfig
from holdfast.errors import ConfigError, TrustError, did_you_mean
from holdfast.registry import Registry, import_object
from holdfast.trust import require_trust

GYM_ID = re.compile(r"[\w/.-]+-v\d+")
"""An id of Gymnasium."""
RESERVED = ("agents", "seed", "device", "name", "agents_per_env", "family", "clip_reward")
"""Parameters of a user world that are no keys: every world gets them, or WorldConfig defines them."""
TYPED = (bool, int, float, str, tuple, list, dict)
PLAIN = (*TYPED, NoneType)
"""Types of defaults that can be written in a config."""


class MixturePart(ConfigBase):
    """One world of a mixture, with its weight."""

    world: "AnyWorldConfig"
    weight: float = Field(default=1.0, gt=0)

    @field_validator("world")
    @classmethod
    def _reject_nesting(cls, world: WorldConfig) -> WorldConfig:
        if isinstance(world, MixtureConfig):
            raise ValueError("a mixture has no mixture inside; name all its worlds in one list")
        if world.clip_reward is not None:
            raise ValueError("rewards of all worlds are clipped alike; set clip_reward of the mixture")
        return world

    @property
    def label(self) -> str:
        """Its name with the values that differ from the defaults: `recall(delay=16)`."""
        values = self.world.model_dump(exclude={"name", "agents"}, exclude_defaults=True)
        text = ",".join(f"{key}={_format(self.world, key, value)}" for key, value in values.items())
        return f"{self.world.name}({text})" if text else self.world.name


class MixtureConfig(WorldConfig):
    """Several worlds at once, which share the agents by weight."""

    family: ClassVar[Family] = Family("holdfast.worlds.mixture:mixture_world", max_shards=1)
    name: str = Field(default="mixture", description="name of the world")
    parts: "Parts" = Field(
        default=(), description="as in 'recall delay=8 weight=3 + n_back'; weights divide the agents"
    )

    @field_validator("parts")
    @classmethod
    def _require_parts(cls, parts: tuple[MixturePart, ...]) -> tuple[MixturePart, ...]:
        if not parts:
            raise ValueError("name the worlds, as in world.parts='recall weight=3 + n_back back=3'")
        return parts


BUILTIN = {
    **WORLD_CONFIGS,
    "mixture": MixtureConfig,
    **EXTERNAL_CONFIGS,
    "rsl_rl": "holdfast.worlds.rsl_rl:RslRlConfig",
}
FAMILIES: Registry[WorldConfig] = Registry("world", "world.name=", "holdfast.worlds", WorldConfig, BUILTIN)
"""Config classes by world name, or by the prefix of `prefix:ID` where `name` has no default."""


def _takes_id(name: str) -> bool:
    return FAMILIES[name].model_fields["name"].is_required()


def usage(name: str) -> str:
    """Return how users type a registered name: `recall`, `gym:ID`."""
    return f"{name}:{FAMILIES[name].family.ids}" if _takes_id(name) else name


def world_prefix(name: str) -> str | None:
    """Return the registered prefix of `prefix:ID`, or None."""
    prefix = name.partition(":")[0]
    return prefix if prefix in FAMILIES and _takes_id(prefix) else None


def world_config_class(name: str) -> type[WorldConfig]:
    """Return the config class of a world; that of a user class is made from its signature."""
    if name in FAMILIES and not _takes_id(name):
        return FAMILIES[name]
    prefix = world_prefix(name)
    if prefix is not None:
        if name in (prefix, f"{prefix}:"):
            raise ConfigError(f"world.name={name}: write {usage(prefix)}.")
        return FAMILIES[prefix]
    if ":" in name:
        # Before the cache, which does not know who asks.
        require_trust(name, name.partition(":")[0])
        return _config_of_user_world(name)
    if GYM_ID.fullmatch(name):
        raise ConfigError(f"world.name={name}: there is no such world; did you mean gym:{name}?")
    words = [word for word in FAMILIES if ":" not in word and not _takes_id(word)]
    hint = did_you_mean(name, words, f"choose from {', '.join(map(usage, FAMILIES))}.")
    raise ConfigError(
        f"world.name={name}: there is no such world; {hint} For your own class, write package.module:Class."
    )


@lru_cache
def _config_of_user_world(name: str) -> type[WorldConfig]:
    try:
        kind = import_object(name, "world.name=")
    except ConfigError as error:
        word, _, env_id = name.partition(":")
        near = get_close_matches(word, filter(_takes_id, FAMILIES), n=1, cutoff=0.75)
        if not near:
            raise
        raise ConfigError(f"{error} Or did you mean {near[0]}:{env_id}?") from error
    if isinstance(kind, type) and issubclass(kind, gymnasium.Env | gymnasium.vector.VectorEnv):
        return GymConfig
    class_name = name.rpartition(":")[2]
    if not callable(kind):
        raise ConfigError(f"world.name={name}: {kind!r} is neither a class nor a function.")
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:
        raise ConfigError(f"world.name={name}: {kind!r} has no signature to read its keys from.") from None
    if "agents" not in parameters:
        raise ConfigError(
            f"world.name={name}: a world is made as {class_name}(agents, *, seed, device, ...); "
            f"this one takes {', '.join(parameters) or 'nothing'}."
        )
    fields: dict[str, Any] = {"name": (str, Field(default=name, description="name of the world"))}
    hints = _type_hints(kind)
    for key, parameter in parameters.items():
        default = parameter.default
        required = default is parameter.empty
        # A default that cannot be written in a config is no key; the class uses it.
        hidden = not required and not isinstance(default, PLAIN)
        variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if key in RESERVED or hidden or variadic:
            continue
        hint = hints.get(key, type(default) if isinstance(default, TYPED) else None)
        field = Field(default=... if required else default, description=f"parameter of {name}")
        fields[key] = (_field_type(hint), field)
    return create_model(f"{class_name}Config", __base__=WorldConfig, __doc__=kind.__doc__, **fields)


def _type_hints(kind: Any) -> dict[str, Any]:
    try:
        return get_type_hints(kind.__init__ if isinstance(kind, type) else kind)
    except (NameError, TypeError):
        # Values of parameters with unreadable annotations are parsed as YAML.
        return {}


def _field_type(hint: Any) -> Any:
    """Return the field type for an annotation; where it is no guide, values are parsed as YAML."""
    kinds = get_args(hint) if isinstance(hint, UnionType) or get_origin(hint) is Union else (hint,)
    if hint is int:
        return Int
    if str in kinds:
        return Annotated[hint, BeforeValidator(parse_optional)] if NoneType in kinds else hint
    return Annotated[Any if hint is None else hint, BeforeValidator(parse_yaml)]


def _format(config: WorldConfig, key: str, value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    is_range = type(config).model_fields[key].annotation == int | tuple[int, int]
    return (".." if is_range else ",").join(map(str, value))


def parse_world(value: Any) -> Any:
    """Build the config of a world from a mapping with its name."""
    if not isinstance(value, dict) or "name" not in value:
        return value
    try:
        kind = world_config_class(str(value["name"]))
        for key in value.keys() - kind.model_fields.keys():
            hint = did_you_mean(key, kind.model_fields, f"it has {', '.join(kind.model_fields)}.")
            raise ConfigError(f"world.{key}: {value['name']} has no such key; {hint}")
        return kind.model_validate(value)
    except ValidationError as error:
        raise ValueError(first_error_message(error, "world.")) from None
    except TrustError:
        # Not an error of the config: pydantic would report it as one.
        raise
    except ConfigError as error:
        raise ValueError(str(error)) from None


def parse_parts(value: Any) -> Any:
    """Parse the worlds of a mixture: `NAME key=value weight=3 + NAME ...`."""
    if not isinstance(value, str):
        return value
    parts = []
    for name, keys in parse_named_list(value, "recall delay=8 + n_back"):
        if "agents" in keys:
            raise ValueError("weights divide the agents; leave agents= out")
        weight = {"weight": keys.pop("weight")} if "weight" in keys else {}
        parts.append({"world": {"name": name, **keys}, **weight})
    return parts


AnyWorldConfig = Annotated[SerializeAsAny[WorldConfig], BeforeValidator(parse_world)]
"""The config of a world, of the class that its name decides."""
Parts = Annotated[tuple[MixturePart, ...], BeforeValidator(parse_parts)]
"""The worlds of a mixture."""

MixturePart.model_rebuild()
MixtureConfig.model_rebuild()
