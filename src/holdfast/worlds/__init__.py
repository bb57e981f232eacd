"""The world speaks: what a step is, the token format, and the worlds that run on tensors."""

import inspect
from collections.abc import Callable
from typing import Any

from holdfast.errors import ConfigError
from holdfast.worlds.arena import Arena
from holdfast.worlds.constant import Constant
from holdfast.worlds.forage import Forage
from holdfast.worlds.key_value import KeyValue
from holdfast.worlds.n_back import NBack
from holdfast.worlds.parity import Parity
from holdfast.worlds.ragged import Ragged
from holdfast.worlds.recall import Recall
from holdfast.worlds.repeat_first import RepeatFirst
from holdfast.worlds.step import Feature, Step, World, WorldSpec
from holdfast.worlds.tmaze import TMaze

__all__ = ["WORLDS", "Feature", "Recall", "Step", "World", "WorldSpec", "make_world"]

WORLDS: dict[str, Callable[..., World]] = {
    "recall": Recall,
    "repeat_first": RepeatFirst,
    "n_back": NBack,
    "tmaze": TMaze,
    "key_value": KeyValue,
    "parity": Parity,
    "forage": Forage,
    "arena": Arena,
    "ragged": Ragged,
    "constant": Constant,
}


def make_world(name: str, agents: int = 64, **options: Any) -> World:
    """Build a world by its name: `make_world("recall", agents=64, delay=8, cues=4)`."""
    if name not in WORLDS:
        raise ConfigError(f"There is no world {name!r}; there is {', '.join(WORLDS)}.")
    known = [key for key in inspect.signature(WORLDS[name]).parameters if key != "agents"]
    for key in options:
        if key not in known:
            raise ConfigError(f"The world {name!r} has no option {key!r}; it has {', '.join(known)}.")
    return WORLDS[name](agents, **options)
