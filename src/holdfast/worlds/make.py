"""Build a world by its name."""

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium

from holdfast.config.world_names import world_config_class, world_prefix
from holdfast.config.worlds import WorldConfig
from holdfast.errors import ConfigError, HoldfastError, MakeError, did_you_mean, located_error_text
from holdfast.install import install_command
from holdfast.registry import import_object, load_object
from holdfast.trust import require_trust_in, require_trust_to_call
from holdfast.worlds.builtin.symbols import Recall
from holdfast.worlds.step import Closeable, World

__all__ = ["Recall", "closing_world", "make_world", "world_options"]

TRAINER_KEYS = ("name", "agents", "clip_reward")
"""Keys of every world's config that its constructor does not take."""


def make_world(name: str, agents: int = 64, **options: Any) -> World:
    """Build a world by its name: `make_world("recall", agents=64, delay=8, cues=4)`.

    Besides the built-in worlds there are `gym:ID`, `popgym:NAME`, `pettingzoo:MODULE`, `envpool:ID`,
    `mettagrid:NAME`, user classes and functions as `package.module:Name`, and `mixture` with
    `parts="recall weight=3 + n_back back=3"`. Every world takes `seed` and `device`.
    """
    kind = world_config_class(name)
    family = kind.family
    require_trust_in(options)
    if not family.constructor:
        return _make_user_world(import_object(name, "world.name="), name, agents, options)
    keys = [key for key in (*kind.model_fields, "seed", "device") if key not in TRAINER_KEYS]
    for key in options.keys() - {*keys, "env"}:
        hint = did_you_mean(key, keys, f"it has {', '.join(keys)}.")
        raise ConfigError(f"The world {name!r} has no option {key!r}; {hint}")
    options = family.with_preset(name, options)
    if family.package and importlib.util.find_spec(family.package) is None:
        install = f"{install_command(family.package)}{family.needs}"
        raise ConfigError(f"world.name={name}: {family.package} is not installed; {install}.")
    if world_prefix(name) is not None:
        options = {"env": name.partition(":")[2], **options}
    elif ":" in name:
        # A Gymnasium class of the user.
        options = {"env": import_object(name, "world.name="), **options}
    constructor = load_object(family.constructor, f"world.name={name}: ")
    parameters = inspect.signature(constructor).parameters
    if "options" in parameters:
        # Keys that the constructor does not take are arguments of the environment (games of mettagrid).
        arguments = {key: options.pop(key) for key in options.keys() - parameters.keys()}
        options["options"] = {**(options.get("options") or {}), **arguments}
    return constructor(agents, **options)


def _make_user_world(kind: Callable[..., Any], name: str, agents: int, options: dict[str, Any]) -> World:
    """Build a world of a user's class or function; it gets `seed` and `device` if it takes them."""
    require_trust_to_call(name, kind)
    if isinstance(kind, type) and not {"reset", "step"} <= set(dir(kind)):
        raise ConfigError(f"{name} is {kind!r}; a world has agents, spec, reset() and step(actions).")
    parameters = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any:
        options = {key: value for key, value in options.items() if key in parameters or key not in ("seed", "device")}
    try:
        world = kind(agents=agents, **options)
    except HoldfastError:
        raise
    except Exception as error:
        raise MakeError(f"world.name={name} cannot be made: {located_error_text(error)}.") from error
    if isinstance(world, gymnasium.Env | gymnasium.vector.VectorEnv):
        raise ConfigError(f"{name} makes a Gymnasium environment; write world=gym:{name}.")
    if not isinstance(world, World):
        raise ConfigError(f"{name} makes {world!r}; a world has agents, spec, reset() and step(actions).")
    if world.agents != agents:
        raise ConfigError(f"{name} has {world.agents} agents; {agents} were requested.")
    return world


def close_world(world: World) -> None:
    """Close a world, if it is Closeable."""
    if isinstance(world, Closeable):
        world.close()


@contextmanager
def closing_world(world: World) -> Iterator[World]:
    """Close a world at the end, if it is Closeable."""
    try:
        yield world
    finally:
        close_world(world)


def world_options(config: WorldConfig) -> dict[str, Any]:
    """Return the arguments of make_world besides name, agents, seed and device."""
    return {key: getattr(config, key) for key in type(config).model_fields if key not in TRAINER_KEYS}
