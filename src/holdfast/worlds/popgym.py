"""POPGym environments by their short names."""

import importlib
from typing import Any

import gymnasium

from holdfast.errors import ConfigError, did_you_mean
from holdfast.worlds.gym import GymWorld


def popgym_world(agents: int, *, env: str, **keywords: Any) -> GymWorld:
    """Build a POPGym environment from its short name or its Gymnasium id."""
    importlib.import_module("popgym")
    short = _short_name(env)
    names = [_short_name(name) for name in map(str, gymnasium.registry) if name.startswith("popgym-")]
    if short not in names:
        hint = did_you_mean(short, names, f"choose from {', '.join(names)}.")
        raise ConfigError(f"world.name=popgym:{env}: popgym has no such environment; {hint}")
    return GymWorld(agents, env=f"popgym-{short}-v0", **keywords)


def _short_name(name: str) -> str:
    return name.removeprefix("popgym-").removesuffix("-v0")
