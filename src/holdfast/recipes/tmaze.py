"""The recipe of `tmaze`: a cue is held on the way to the arm it told."""

from holdfast.config import Config
from holdfast.knobs import TMazeWorld
from holdfast.recipes.little import little, walks


def tmaze() -> Config:
    """A corridor of 4 cells: 0.0 without memory, best 1.0."""
    # Staying away costs 1 after 20 steps: discounted by 0.9, it would seem to cost next to nothing.
    return little(TMazeWorld(), walks(gamma=0.98, gae_lambda=0.95), steps=150_000)
