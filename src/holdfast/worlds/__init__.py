"""Worlds: the contract, built-in worlds on tensors, and adapters of other packages, imported on use."""

import importlib
from typing import TYPE_CHECKING, Any

from holdfast.worlds.step import Feature, Step, World, WorldSpec

if TYPE_CHECKING:
    from holdfast.worlds.builtin.symbols import Recall
    from holdfast.worlds.make import closing_world, make_world, world_options

__all__ = ["Feature", "Recall", "Step", "World", "WorldSpec", "closing_world", "make_world", "world_options"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("holdfast.worlds.make"), name)
