"""Which game is meant: one of ours by its name, or a function of yours that returns a MettaGridConfig."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import ConfigError, HoldfastError, did_you_mean
from holdfast.named import find_named
from holdfast.worlds.mettagrid import engine


@dataclass(frozen=True)
class Game:
    """A MettaGridConfig, and what is known of it."""

    config: Any
    draw_map: Callable[[int], Any] | None = None
    """Makes the map of an episode from its seed; none: the map builder of the config does, seeded."""
    best_return: float | None = None
    best_return_without_memory: float | None = None


def find_game(
    env: str | Callable[..., Any], ours: Mapping[str, Callable[..., Game]], options: Mapping[str, Any]
) -> tuple[str, Game]:
    """Make a game, and say what the world is called in errors."""
    if not isinstance(env, str):
        name, make = f"mettagrid:{getattr(env, '__name__', repr(env))}", env
    elif env in ours:
        name, make = f"mettagrid:{env}", ours[env]
    elif ":" not in env:
        meant = did_you_mean(env, ours, f"there is {', '.join(ours)}.")
        raise ConfigError(
            f"world.name=mettagrid:{env}: there is no such game; {meant} Your own goes by "
            "mettagrid:package.module:function."
        )
    else:
        name, make = f"mettagrid:{env}", find_named(env, "world.name=mettagrid:")
    kind = engine.part(engine.CONFIG).MettaGridConfig
    _require_options(name, make, options)
    try:
        made = make(**options)
    except HoldfastError:
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {told}") from error
    game = made if isinstance(made, Game) else Game(made)
    if not isinstance(game.config, kind):
        raise ConfigError(f"{name} returns {type(made).__name__}; what is wanted is a MettaGridConfig.")
    return name, game


def _require_options(name: str, make: Any, options: Mapping[str, Any]) -> None:
    if not callable(make):
        raise ConfigError(f"{name} is {make!r}; give a function that returns a MettaGridConfig.")
    takes = inspect.signature(make).parameters
    if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return
    for key in options:
        if key not in takes:
            meant = did_you_mean(key, takes, f"it has {', '.join(takes) or 'none'}.")
            raise ConfigError(f"The world {name!r} has no option {key!r}; {meant}")
