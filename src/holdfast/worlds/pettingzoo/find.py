"""Which parallel environment is meant: a module, a function or class by its name, or one of these itself."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from holdfast.errors import ConfigError, HoldfastError
from holdfast.named import find_named
from holdfast.worlds.gym.find import NamedWrap, Wrap, import_for, made_and_wrapped, wrappers_named
from holdfast.worlds.gym.numbered import said
from holdfast.worlds.pettingzoo.crowd import Crowd

DOOR = "pettingzoo:"


@dataclass(frozen=True)
class Found:
    """A parallel environment that can be made, as often as it is needed."""

    name: str
    """What the world is called in errors."""
    make: Callable[[], Crowd]


def find_parallel(
    env: str | Callable[..., Any], options: Mapping[str, Any], wrappers: Sequence[Wrap]
) -> Found:
    """Find a parallel environment by its module, as `package.module:function`, or take what makes it."""
    zoo = import_for("", "pettingzoo", DOOR.removesuffix(":"))
    found = _named(env) if isinstance(env, str) else env
    name = f"{DOOR}{env if isinstance(env, str) else getattr(found, '__name__', repr(found))}"
    if not callable(found):
        raise ConfigError(f"{name}: {found!r} is no function or class that makes a parallel environment.")
    if isinstance(found, type) and not issubclass(found, zoo.ParallelEnv | zoo.AECEnv):
        # Before it is called: a class of anything else would do with the options what it does.
        raise ConfigError(f"{name}: {found!r} is not a subclass of pettingzoo.ParallelEnv.")
    return Found(name, partial(_made, name, partial(found, **options), wrappers_named(wrappers)))


def _named(name: str) -> Any:
    """Find what a name means: of a module, its `parallel_env`."""
    module, colon, _ = name.partition(":")
    inside = import_for(name, module, DOOR)
    if colon:
        return find_named(name, DOOR)
    if "parallel_env" not in vars(inside):
        raise ConfigError(
            f"{DOOR}{name}: {module} has no parallel_env; name the function or class that makes one, "
            f"{DOOR}{module}:NAME."
        )
    return vars(inside)["parallel_env"]


def _made(name: str, make: Callable[[], Any], around: Sequence[NamedWrap]) -> Crowd:
    env = made_and_wrapped(name, make, around)
    zoo = importlib.import_module("pettingzoo")
    if isinstance(env, zoo.AECEnv):
        raise ConfigError(
            f"{name} makes an AECEnv, in which one acts after the other; what is wanted is a ParallelEnv. "
            "If it may be one, write world.wrappers=pettingzoo.utils.conversions:aec_to_parallel."
        )
    if not isinstance(env, zoo.ParallelEnv):
        raise ConfigError(f"{name}: {env!r} was made; what is wanted is a pettingzoo.ParallelEnv.")
    try:
        return Crowd(env, name)
    except HoldfastError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} does not say its spaces: {said(error)}") from error
