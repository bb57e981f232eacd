"""Environments that a Python program passes instead of a name: objects, and functions that make them."""

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import gymnasium
from gymnasium.vector import VectorEnv

from holdfast.config.world_names import GYM_ID, world_prefix
from holdfast.config.worlds import PythonConfig, WorldConfig
from holdfast.errors import ConfigError, HoldfastError, MakeError, located_error_text
from holdfast.worlds.step import Device, World

EnvLike = str | gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any] | World | Callable[..., Any]
"""An environment: its name, an object, or a function or class that makes it."""
PYTHON = "python:"
"""Prefix of the names of objects."""


@dataclass(frozen=True)
class EnvSource:
    """An environment that no name leads to: one that exists, or a function that makes it."""

    name: str
    """`python:` and the id or class of the environment."""
    kind: Literal["env", "vector", "world", "function"]
    """What `make` returns; `function`: a world, made as `make(agents=..., seed=..., device=...)`."""
    make: Callable[..., Any]
    agents: int | None = None
    """Its number of agents; none: as many as requested."""
    is_object: bool = False
    """Whether it exists: then there is no second one for evaluations, and its owner closes it."""

    def build(self, agents: int, seed: int, device: Device, **keys: Any) -> World:
        """Make the world; `keys` are those of `GymConfig`."""
        if self.agents not in (None, agents):
            if self.kind != "env":
                raise ConfigError(f"{self.name} has {self.agents} agents; leave out world.agents={agents}.")
            raise ConfigError(
                f"{self.name} is one environment, with one agent, not {agents}; pass a function that makes them, "
                f"env=lambda: ..., or leave out world.agents={agents}."
            )
        if self.kind in ("world", "function"):
            keys = {key: value for key, value in keys.items() if value != PythonConfig.model_fields[key].default}
            for key in keys:
                raise ConfigError(f"world.{key} is for Gymnasium environments; {self.name} is a world: leave it out.")
            options = {"seed": seed, "device": device}
            return self.make() if self.kind == "world" else call_world(self.make, self.name, agents, options)
        if keys.get("options"):
            raise ConfigError(f"world.options: pass the arguments of {self.name} where it is made, and leave them out.")
        from holdfast.worlds.gym import GymWorld

        env = self.make() if self.kind == "vector" else self.make
        return GymWorld(agents, env=env, seed=seed, device=device, **keys)


class KeepOpen(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment that its owner closes; a vector environment closes those it holds when it is deleted."""

    def close(self) -> None:
        """Leave it open."""


class EnvFactory:
    """Makes environments by a function; the first is the one that showed what the function makes."""

    def __init__(self, make: Callable[[], Any], first: Any, name: str) -> None:
        self._make, self._first, self.__name__ = make, [first], name

    def __call__(self) -> Any:
        """Return an environment that no other call returns."""
        return self._first.pop() if self._first else self._make()


def python_world(
    agents: int, *, env: str, source: Any = None, seed: int = 0, device: Device = "cpu", **keys: Any
) -> World:
    """Make the world of a `PythonConfig`; after it was read from a file, its object is missing."""
    if not isinstance(source, EnvSource):
        raise ConfigError(
            f"The environment {PYTHON}{env} is an object of a Python program, which no file holds; pass it again: "
            "holdfast.train(env=..., resume=RUN), holdfast.load(RUN, env=...)."
        )
    return source.build(agents, seed, device, **keys)


def source_of(config: WorldConfig) -> EnvSource | None:
    """Return the object or function of a world's config; None: it has a name."""
    return config.source if isinstance(config, PythonConfig) else None


def find_source(env: EnvLike) -> str | EnvSource:
    """Return the name of an environment, or its source if it has none.

    An id of Gymnasium becomes `gym:ID`, and a class that can be imported `package.module:Class`.
    """
    if isinstance(env, str):
        is_id = GYM_ID.fullmatch(env.rpartition(":")[2]) and world_prefix(env) is None
        return f"gym:{env}" if is_id else env
    if isinstance(env, type):
        # By its name a vector environment would have to take the number of agents.
        return (None if issubclass(env, VectorEnv) else importable_name(env)) or function_source(env)
    source = _source_of_object(env, lambda: env, is_object=True)
    if source is not None:
        return source
    if callable(env):
        return function_source(env)
    raise ConfigError(
        f"env={env!r} is {type(env).__name__}; give the id of a Gymnasium environment, the name of a world, an "
        "environment, a vector environment, a world, or a function or class that makes one."
    )


def importable_name(kind: type) -> str | None:
    """Return `package.module:Class`, if another program finds the class by it."""
    module = sys.modules.get(kind.__module__)
    is_found = module is not None and vars(module).get(kind.__qualname__) is kind
    return f"{kind.__module__}:{kind.__qualname__}" if is_found and kind.__module__ != "__main__" else None


def _source_of_object(env: Any, make: Callable[[], Any], *, is_object: bool) -> EnvSource | None:
    """Return the source of an environment or world; None: it is neither."""
    if isinstance(env, gymnasium.Env):
        name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
        if is_object:
            return EnvSource(PYTHON + name, "env", EnvFactory(lambda: KeepOpen(env), KeepOpen(env), name), 1, True)
        return EnvSource(PYTHON + name, "env", EnvFactory(make, env, name))
    if isinstance(env, VectorEnv):
        name = type(env.unwrapped).__name__ if env.spec is None else env.spec.id
        return EnvSource(PYTHON + name, "vector", EnvFactory(make, env, name), env.num_envs, is_object)
    if isinstance(env, World):
        return EnvSource(PYTHON + type(env).__name__, "world", EnvFactory(make, env, ""), env.agents, is_object)
    return None


def function_source(make: Callable[..., Any]) -> EnvSource:
    """Return the source of a function or class; what it makes decides, unless it takes the number of agents."""
    name = getattr(make, "__name__", type(make).__name__)
    is_env = isinstance(make, type) and issubclass(make, gymnasium.Env | VectorEnv)
    if not is_env and "agents" in _parameters(make):
        return EnvSource(f"{PYTHON}{name}", "function", make)
    try:
        env = make()
    except HoldfastError:
        raise
    except Exception as error:
        raise MakeError(f"env={name} cannot be called: {located_error_text(error)}.") from error
    source = _source_of_object(env, make, is_object=False)
    if source is None:
        raise ConfigError(f"env={name} makes {env!r}; it must make a Gymnasium environment or a world.")
    return source


def _parameters(function: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(function).parameters)
    except ValueError:
        # Written in C, without a signature.
        return set()


def call_world(make: Callable[..., Any], name: str, agents: int, options: Mapping[str, Any]) -> World:
    """Build a world by a user's class or function; it gets `seed` and `device` if it takes them."""
    if isinstance(make, type) and not {"reset", "step"} <= set(dir(make)):
        raise ConfigError(f"{name} is {make!r}; a world has agents, spec, reset() and step(actions).")
    parameters = inspect.signature(make).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any:
        options = {key: value for key, value in options.items() if key in parameters or key not in ("seed", "device")}
    try:
        world = make(agents=agents, **options)
    except HoldfastError:
        raise
    except Exception as error:
        raise MakeError(f"world.name={name} cannot be made: {located_error_text(error)}.") from error
    if isinstance(world, gymnasium.Env | VectorEnv):
        hint = "leave out its parameter agents" if name.startswith(PYTHON) else f"write world=gym:{name}"
        raise ConfigError(f"{name} makes a Gymnasium environment; {hint}.")
    if not isinstance(world, World):
        raise ConfigError(f"{name} makes {world!r}; a world has agents, spec, reset() and step(actions).")
    if world.agents != agents:
        raise ConfigError(f"{name} has {world.agents} agents; {agents} were requested.")
    return world
