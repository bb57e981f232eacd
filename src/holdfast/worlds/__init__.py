"""The world speaks: what a step is, the token format, worlds that run on tensors, and doors to others."""

from holdfast.worlds.make import WORLDS, closing_world, make_world, options_of
from holdfast.worlds.recall import Recall
from holdfast.worlds.step import Feature, Step, World, WorldSpec

__all__ = [
    "WORLDS",
    "Feature",
    "Recall",
    "Step",
    "World",
    "WorldSpec",
    "closing_world",
    "make_world",
    "options_of",
]
