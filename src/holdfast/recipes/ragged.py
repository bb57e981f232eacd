"""The recipe of `ragged`: a cue is named by agents who come and go."""

from holdfast.config import Config
from holdfast.knobs import RaggedWorld
from holdfast.recipes.little import answers, little


def ragged() -> Config:
    """4 cues, named 0 to 8 steps later: 0.25 without memory, best 1.0."""
    return little(RaggedWorld(), answers(), steps=100_000)
