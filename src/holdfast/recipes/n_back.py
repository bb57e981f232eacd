"""The recipe of `n_back`: what was seen two steps ago is named."""

from holdfast.config import Config
from holdfast.knobs import NBackWorld
from holdfast.recipes.little import answers, little


def n_back() -> Config:
    """4 symbols, 2 steps back: 0.25 without memory, best 1.0."""
    return little(NBackWorld(), answers(), steps=100_000)
