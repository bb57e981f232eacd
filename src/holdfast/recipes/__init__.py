"""Recipes: whole runs as functions that return a config."""

from collections.abc import Callable

from holdfast.config import Config
from holdfast.errors import ConfigError, did_you_mean
from holdfast.recipes.recall import recall

__all__ = ["DEFAULT", "RECIPES", "find_recipe"]

RECIPES: dict[str, Callable[[], Config]] = {"recall": recall}
DEFAULT = "recall"


def find_recipe(name: str) -> Config:
    """Return a recipe's config by its name."""
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES, f"there is {', '.join(RECIPES)}.")
        raise ConfigError(f"There is no recipe {name!r}; {hint}")
    return RECIPES[name]()
