"""The keys of a run that differ from its recipe, compared as data: the config may be of another version."""

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.config.run import Config, override
from holdfast.errors import ConfigError
from holdfast.recipes import ELSEWHERE, RECIPES, find_recipe, recipe_for
from holdfast.report.run_data import RunData
from holdfast.report.text import WHERE


def recipe_difference(runs: Sequence[RunData]) -> tuple[str | None, list[list[str]]]:
    """Return the recipe of the first run, and rows of key, recipe's value, each run's value.

    None: a config cannot be read.
    """
    name = recipe_name(runs[0])
    try:
        recipe = find_recipe(name)
    except ConfigError:
        return None, []
    if not all(isinstance(run.config, dict) for run in runs):
        return None, []
    columns = [_in_world(recipe, runs[0].text("world", "name")), *(dict(_flat(run.config)) for run in runs)]
    # `general` has no world of its own.
    ignored = {*WHERE, "report", *(["world.name"] if name == ELSEWHERE else [])}
    keys = [key for key in dict.fromkeys(key for column in columns for key in column) if key not in ignored]
    rows = [[key, *(column.get(key, "-") for column in columns)] for key in keys]
    return name, [row for row in rows if len(set(row[1:])) > 1 and not _of_another_world(row)]


def _of_another_world(row: Sequence[str]) -> bool:
    return row[0].startswith("world.") and all(value == "-" for value in row[2:])


def _in_world(recipe: Config, world: str) -> dict[str, str]:
    """Return the keys of a recipe, and those of the run's world with their defaults."""
    keys = dict(_flat(recipe.model_dump(mode="json")))
    try:
        changed = override(recipe, {"world.name": world})
    except ConfigError:
        return keys
    return dict(_flat(changed.model_dump(mode="json"))) | keys


def recipe_name(run: RunData) -> str:
    """Return the recipe that the command names, or that of the world."""
    try:
        words = shlex.split(run.command.partition("\n")[0].partition(":")[2])
    except ValueError:
        words = []
    if words[:2] == ["holdfast", "train"]:
        names = [word for word in words[2:] if word in RECIPES]
        return names[0] if names else recipe_for(run.text("world", "name"))
    first = run.command.partition("holdfast.train(")[2].partition(",")[0].strip("'\") \n")
    return first if first in RECIPES else recipe_for(run.text("world", "name"))


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and len(prefix) < 200:
        for key, value in tree.items():
            yield from _flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, list) and prefix == "schedule" and all(isinstance(item, dict) for item in tree):
        for item in tree:
            yield f"schedule.{item.get('key')}", f"{item.get('kind')}:{item.get('end')}"
    elif tree is None or tree in ([], ()):
        yield prefix, "none"
    elif isinstance(tree, str):
        yield prefix, tree
    else:
        yield prefix, json.dumps(tree, default=str)
