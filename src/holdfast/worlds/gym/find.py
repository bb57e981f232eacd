"""Which environment is meant: an id, a class or function by its name, or one of these itself."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec

from holdfast.errors import ConfigError, did_you_mean
from holdfast.named import find_named
from holdfast.worlds.gym.numbered import said

EXTRAS = {"popgym": "popgym", "pettingzoo": "pettingzoo", "envpool": "envpool"}
"""Packages that come with an extra of this one."""
Wrap = str | Callable[[Any], Any]
NamedWrap = tuple[str, Callable[[Any], Any]]


@dataclass(frozen=True)
class Found:
    """An environment that can be made: once for every agent."""

    name: str
    """What the world is called in errors."""
    make: Callable[[], gymnasium.Env[Any, Any]]
    spec: EnvSpec | None = None
    """What Gymnasium has registered; None for a class or function."""


def find_env(env: str | Callable[..., Any], options: Mapping[str, Any], wrappers: Sequence[Wrap]) -> Found:
    """Find an environment by its id, as `module:ID`, as `package.module:Class`, or take what makes it."""
    found = _named(env) if isinstance(env, str) else env
    if isinstance(found, EnvSpec):
        # Bare: the checks of order and of spaces are made here, and wrappers may want the environment itself.
        bare = replace(found, order_enforce=False, disable_env_checker=True)
        name, make = f"gym:{env}", partial(gymnasium.make, bare, **options)
    elif isinstance(found, type) and not issubclass(found, gymnasium.Env | gymnasium.vector.VectorEnv):
        # Before it is called: a class of anything else would do with the options what it does.
        raise ConfigError(f"gym:{env}: {found!r} is not a subclass of gymnasium.Env.")
    elif callable(found) and not isinstance(found, gymnasium.Env):
        name = f"gym:{env if isinstance(env, str) else getattr(found, '__name__', repr(found))}"
        make = partial(found, **options)
    else:
        raise ConfigError(
            f"gym:{env}: every agent needs an environment of its own; give an id, a class or a function that "
            "makes one, not one that is made."
        )
    around = wrappers_named(wrappers)
    spec = found if isinstance(found, EnvSpec) else None
    return Found(name, partial(_made, name, make, around), spec)


def _made(name: str, make: Callable[[], Any], around: Sequence[NamedWrap]) -> gymnasium.Env[Any, Any]:
    env = made_and_wrapped(name, make, around)
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(f"{name}: {env!r} was made; what is wanted is a gymnasium.Env.")
    return env


def made_and_wrapped(name: str, make: Callable[[], Any], around: Sequence[NamedWrap]) -> Any:
    """Make one environment and wrap it, innermost first."""
    doing, env = "cannot be made", None
    try:
        env = make()
        for wrapper, wrap in around:
            doing = f"cannot be wrapped in {wrapper}"
            env = wrap(env)
    except Exception as error:
        raise ConfigError(f"{name} {doing}: {said(error)}") from error
    return env


def wrappers_named(wrappers: Sequence[Wrap]) -> list[NamedWrap]:
    """Find what is to go around an environment, each with its name."""
    return [_wrapper(wrap) for wrap in wrappers]


def _wrapper(wrap: Wrap) -> NamedWrap:
    if not isinstance(wrap, str):
        return getattr(wrap, "__name__", repr(wrap)), wrap
    import_for(wrap, wrap.partition(":")[0], "world.wrappers=")
    return wrap, find_named(wrap, "world.wrappers=")


def _named(name: str) -> Any:
    """Find an EnvSpec, a class or a function by its name; an id that is registered comes first."""
    module, colon, thing = name.rpartition(":")
    if not colon:
        return _registered(name, name, "")
    inside = vars(import_for(name, module, "gym:"))
    if thing in gymnasium.registry or thing not in inside:
        others = [each for each in inside if not each.startswith("_")] if thing.isidentifier() else []
        return _registered(thing, name, f"{module}:", others)
    return find_named(name, "gym:")


def _registered(env_id: str, name: str, prefix: str, others: Sequence[str] = ()) -> EnvSpec:
    try:
        return gymnasium.spec(env_id)
    except gymnasium.error.Error as error:
        near = did_you_mean(env_id, [*map(str, gymnasium.registry), *others], "")
        meant = near.replace("mean ", f"mean {prefix}") + " " if near else ""
        raise ConfigError(
            f"gym:{name} is not registered; {meant}an id that a package registers goes by package:ID, "
            "a class by package.module:Class."
        ) from error


def import_for(name: str, module: str, key: str) -> Any:
    """Import a module that an environment or a wrapper is in; errors say for which key."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in EXTRAS:
            raise ConfigError(
                f"{key}{name}: {package} is not installed; pip install 'holdfast[{EXTRAS[package]}]'."
            ) from error
        raise ConfigError(f"{key}{name}: {error}; is {module} on the Python path?") from error
    except Exception as error:
        raise ConfigError(f"{key}{name}: {module} cannot be imported: {said(error)}") from error
