"""Recipes of mettagrid: hold a cue on the way to an altar, and use altars before others do."""

from holdfast.config import Config
from holdfast.mettagrid_knobs import MettaGridCollect, MettaGridTMaze
from holdfast.recipes.little import little, walks


def mettagrid_tmaze() -> Config:
    """A corridor of 4 cells: 0.0 without memory, best 1.0."""
    world = MettaGridTMaze(name="mettagrid:tmaze")
    return little(world, walks(gamma=0.95, gae_lambda=0.95), steps=120_000, horizon=32, minibatches=8)


def mettagrid_collect() -> Config:
    """24 agents on a map: best 4.0; nothing has to be remembered."""
    world = MettaGridCollect(name="mettagrid:collect")
    return little(world, walks(gamma=0.9, gae_lambda=0.9), steps=500_000, horizon=32, minibatches=8)
