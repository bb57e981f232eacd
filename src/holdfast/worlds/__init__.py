"""The world speaks: what a step is, the token format, and the worlds that run on tensors."""

import inspect
from typing import Any

from holdfast.errors import ConfigError
from holdfast.worlds.recall import Recall
from holdfast.worlds.step import Feature, Step, World, WorldSpec

__all__ = ["WORLDS", "Feature", "Recall", "Step", "World", "WorldSpec", "make_world"]

WORLDS: dict[str, type[Recall]] = {"recall": Recall}


def make_world(name: str, agents: int = 64, **options: Any) -> World:
    """Build a world by its name: `make_world("recall", agents=64, delay=8, cues=4)`."""
    if name not in WORLDS:
        raise ConfigError(f"There is no world {name!r}; there is {', '.join(WORLDS)}.")
    known = [key for key in inspect.signature(WORLDS[name]).parameters if key != "agents"]
    for key in options:
        if key not in known:
            raise ConfigError(f"The world {name!r} has no option {key!r}; it has {', '.join(known)}.")
    return WORLDS[name](agents, **options)
