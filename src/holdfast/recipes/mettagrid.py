"""Recipes of mettagrid: hold a cue on the way to an altar, and use altars before others do."""

from holdfast.config import Config
from holdfast.mettagrid_knobs import MettaGridCollect, MettaGridTMaze
from holdfast.recipes.little import little, walks


def mettagrid_tmaze() -> Config:
    """A corridor of 4 cells: 0.0 without memory, best 1.0."""
    world = MettaGridTMaze(name="mettagrid:tmaze")
    # The way is found soon, and the return stays at 0 until the cue is held. With a step size of 1e-3 one of
    # two seeds was there after 100 k steps, with 3e-3 all of five after 25 k to 50 k.
    return little(
        world,
        walks(gamma=0.95, gae_lambda=0.95),
        steps=100_000,
        horizon=32,
        minibatches=8,
        learning_rate=3e-3,
        eval_episodes=1000,
    )


def mettagrid_collect() -> Config:
    """24 agents on a map: best 4.0; nothing has to be remembered."""
    world = MettaGridCollect(name="mettagrid:collect")
    ppo = walks(gamma=0.9, gae_lambda=0.9)
    return little(world, ppo, steps=200_000, horizon=32, minibatches=8, eval_episodes=480)
