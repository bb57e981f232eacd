"""Recipes: whole runs as functions that return a config."""

from collections.abc import Callable
from difflib import get_close_matches

from holdfast.config import Config
from holdfast.errors import ConfigError
from holdfast.recipes.recall import recall

__all__ = ["DEFAULT", "RECIPES", "find_recipe"]

RECIPES: dict[str, Callable[[], Config]] = {"recall": recall}
DEFAULT = "recall"


def find_recipe(name: str) -> Config:
    """Return a recipe's config by its name."""
    if name not in RECIPES:
        near = get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is {', '.join(RECIPES)}."
        raise ConfigError(f"There is no recipe {name!r}; {hint}")
    return RECIPES[name]()
