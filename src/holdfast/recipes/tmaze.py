"""The recipe of `tmaze`: a cue is held on the way to the arm it told."""

from holdfast.config import Config
from holdfast.knobs import TMazeWorld
from holdfast.recipes.little import little, walks


def tmaze() -> Config:
    """A corridor of 4 cells: 0.0 without memory, best 1.0."""
    # Staying away costs 1 after 20 steps: discounted by 0.9, it would seem to cost next to nothing. As long
    # as nobody knows the way, the cue is up to 20 steps back: segments must be longer.
    ppo = walks(gamma=0.95, gae_lambda=0.95)
    return little(TMazeWorld(), ppo, steps=120_000, horizon=32, minibatches=8)
