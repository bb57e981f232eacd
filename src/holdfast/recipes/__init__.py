"""Recipes: whole runs as functions that return a config."""

from collections.abc import Callable

from holdfast.config import Config
from holdfast.errors import ConfigError, did_you_mean
from holdfast.mettagrid_knobs import METTAGRID_KNOBS
from holdfast.recipes.arena import arena
from holdfast.recipes.balance import cartpole, envpool_cartpole, general
from holdfast.recipes.constant import constant
from holdfast.recipes.forage import forage
from holdfast.recipes.key_value import key_value
from holdfast.recipes.mettagrid import mettagrid_collect, mettagrid_tmaze
from holdfast.recipes.n_back import n_back
from holdfast.recipes.parity import parity
from holdfast.recipes.popgym import popgym_cartpole, popgym_repeat_first
from holdfast.recipes.ragged import ragged
from holdfast.recipes.recall import recall
from holdfast.recipes.repeat_first import repeat_first
from holdfast.recipes.tmaze import tmaze

__all__ = ["DEFAULT", "ELSEWHERE", "RECIPES", "find_recipe", "recipe_for"]

RECIPES: dict[str, Callable[[], Config]] = {
    "recall": recall,
    "repeat_first": repeat_first,
    "n_back": n_back,
    "tmaze": tmaze,
    "key_value": key_value,
    "parity": parity,
    "forage": forage,
    "arena": arena,
    "ragged": ragged,
    "constant": constant,
    "general": general,
    "cartpole": cartpole,
    "envpool_cartpole": envpool_cartpole,
    "popgym_repeat_first": popgym_repeat_first,
    "popgym_cartpole": popgym_cartpole,
    "mettagrid_tmaze": mettagrid_tmaze,
    "mettagrid_collect": mettagrid_collect,
}
"""One for each world on tensors, by its name; and some of other packages'."""
DEFAULT = "recall"
ELSEWHERE = "general"
"""Where to begin in worlds that nobody has tuned anything for."""


def recipe_for(world: str | None) -> str:
    """Say which recipe is meant where none is named: that of the world, if it has one."""
    if world in RECIPES:
        return world
    if world in METTAGRID_KNOBS:
        return world.replace(":", "_")
    return ELSEWHERE if world is not None and ":" in world else DEFAULT


def find_recipe(name: str) -> Config:
    """Return a recipe's config by its name."""
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES, f"there is {', '.join(RECIPES)}.")
        raise ConfigError(f"There is no recipe {name!r}; {hint}")
    return RECIPES[name]()
