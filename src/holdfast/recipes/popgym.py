"""Recipes of popgym: name what was seen first, and balance a pole whose speed is hidden."""

from holdfast.config import Config
from holdfast.recipes.balance import balance
from holdfast.recipes.little import answers, little
from holdfast.which_world import GymKnobs


def popgym_repeat_first() -> Config:
    """RepeatFirstEasy as it is: no action before it, no start marker; -0.5 without memory, best 1.0.

    Episodes have 51 steps and segments 16: only who carries and clears right learns it.
    """
    world = GymKnobs(name="popgym:RepeatFirstEasy")
    return little(world, answers(), steps=300_000, eval_episodes=250)


def popgym_cartpole() -> Config:
    """PositionOnlyCartPoleEasy, 200 steps: best 1.0."""
    # With 64 agents and 250 k steps four of five seeds get there, and some fall again; with 400 k one in five
    # may be at 0.93 when it ends.
    world = GymKnobs(name="popgym:PositionOnlyCartPoleEasy", agents=128)
    return balance(world, steps=500_000, learning_rate_end=0.0)
