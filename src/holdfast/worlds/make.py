"""Build a world by its name."""

import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.config.world_names import world_config_class, world_prefix
from holdfast.config.worlds import WorldConfig
from holdfast.errors import ConfigError, did_you_mean
from holdfast.install import install_command
from holdfast.registry import import_object, load_object
from holdfast.trust import require_trust_in, require_trust_to_call
from holdfast.worlds.builtin.symbols import Recall
from holdfast.worlds.env_source import EnvLike, EnvSource, call_world, find_source, source_of
from holdfast.worlds.step import Closeable, World

__all__ = ["Recall", "closing_world", "make_world", "world_options"]

AGENTS = 64
TRAINER_KEYS = ("name", "agents", "clip_reward")
"""Keys of every world's config that its constructor does not take."""


def make_world(env: EnvLike, agents: int | None = None, **options: Any) -> World:
    """Build a world of environments: `make_world("recall", agents=64, delay=8, cues=4)`.

    `env` is an id of Gymnasium (`CartPole-v1`), a Gymnasium environment or vector environment, a function or class that
    makes one, or the name of a world. Besides the built-in worlds these are `gym:ID`, `popgym:NAME`,
    `pettingzoo:MODULE`, `envpool:ID`, `mettagrid:NAME`, user classes and functions as `package.module:Name`, and
    `mixture` with `parts="recall weight=3 + n_back back=3"`. Every world takes `seed` and `device`. There are 64 agents
    by default, for an environment 1, for a vector environment as many as it has.
    """
    source = find_source(env)
    if isinstance(source, EnvSource):
        options, name = {**options, "source": source}, source.name
        agents = source.agents if agents is None else agents
    else:
        name = source
    return _make_world(name, AGENTS if agents is None else agents, options)


def _make_world(name: str, agents: int, options: dict[str, Any]) -> World:
    """Build a world by its name; `options` are arguments of its constructor."""
    kind = world_config_class(name)
    family = kind.family
    require_trust_in(options)
    if not family.constructor:
        make = import_object(name, "world.name=")
        require_trust_to_call(name, make)
        return call_world(make, name, agents, options)
    keys = [key for key in (*kind.model_fields, "seed", "device") if key not in TRAINER_KEYS]
    for key in options.keys() - {*keys, "env"}:
        keys = [word for word in keys if word != "source"]
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


def close_world(world: World) -> None:
    """Close a world, if it is Closeable."""
    if isinstance(world, Closeable):
        world.close()


@contextmanager
def closing_world(world: World, config: WorldConfig | None = None) -> Iterator[World]:
    """Close a world at the end, if it is Closeable; not if its config holds an object, which its owner closes."""
    source = None if config is None else source_of(config)
    try:
        yield world
    finally:
        if source is None or not source.is_object:
            close_world(world)


def world_options(config: WorldConfig) -> dict[str, Any]:
    """Return the arguments of make_world besides name, agents, seed and device."""
    return {key: getattr(config, key) for key in type(config).model_fields if key not in TRAINER_KEYS}
