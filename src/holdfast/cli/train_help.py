"""`holdfast train --help`: recipes, worlds, and every key in sections."""

from rich.console import Console
from rich.table import Column, Table

from holdfast.config.base import keys_of
from holdfast.config.recipe_file import is_recipe_file
from holdfast.config.run import Config, all_keys, format_value, lookup, override
from holdfast.config.world_names import FAMILIES, usage
from holdfast.errors import ConfigError, did_you_mean
from holdfast.recipes import DEFAULT, ELSEWHERE, RECIPES, find_recipe, recipe_for

TRACED = 42
"""The agent that `--trace` logs by default."""
RUN = "run"
"""The section of keys without a prefix."""


def section_of(key: str) -> str:
    """Return the section of a key: its prefix."""
    return key.rpartition(".")[0] or RUN


def print_help(word: str | None, world: str | None) -> None:
    """Print every key with its value in a recipe, or those of a section; for a world if one is named."""
    is_recipe = word is not None and (word in RECIPES or is_recipe_file(word))
    recipe = word if word is not None and is_recipe else recipe_for(world)
    config = override(find_recipe(recipe), {"world": world} if world else {})
    sections = list(dict.fromkeys(map(section_of, all_keys(config.world.name))))
    chosen = [name for name in sections if word and f"{name}.".startswith(f"{word}.")]
    if word is not None and not is_recipe and not chosen:
        hint = did_you_mean(word, [*RECIPES, *sections], f"sections are {', '.join(sections)}.")
        raise ConfigError(f"There is no recipe or section {word!r}; {hint}")
    out = Console(highlight=False, markup=False, emoji=False)
    if not chosen:
        _print_usage(out)
        _print_worlds(out, config.world.name)
        out.print(f"Sections: {', '.join(sections)}; --help SECTION shows one of them.\n")
    _print_keys(out, recipe, config, chosen or sections)


def _print_usage(out: Console) -> None:
    out.print("usage: holdfast train [RECIPE | FILE.yaml] key=value ...")
    out.print("       holdfast train [RECIPE] seeds=0..4 key=value ...")
    out.print("       holdfast train --resume runs/NAME [key=value ...] [--trust-code]")
    out.print("       holdfast train --help [RECIPE | SECTION] [world=NAME]\n")
    out.print(f"Recipes: {', '.join(RECIPES)}.")
    out.print(
        f"The default is that of world=NAME, {ELSEWHERE} for environments of other packages, else {DEFAULT}. "
        "Integers may be written 1e6 or 5_000."
    )
    out.print("FILE.yaml is a recipe file: `recipe: NAME`, and a line `KEY: VALUE` for each key that it changes.")
    out.print("seeds=0..4 or seeds=0,3,7 trains each seed, and ends with a table, seeds.json and a report.")
    out.print("policy=NAME and py_agent=NAME mean policy.name=NAME; world=NAME means world.name=NAME.")
    out.print("agent=NAME is the same policy as a component graph; agent=FILE.yaml is your own graph.")
    out.print("schedule.KEY=KIND:END changes a value over the run, to END: linear, cosine, exponential,")
    out.print(f"logarithmic; constant: no schedule. --trace logs agent {TRACED}'s memory, --trace=N agent N's.")
    out.print("--trust-code imports what a resumed run, a recipe file or a teacher names, installed or not.\n")


def _print_keys(out: Console, recipe: str, config: Config, sections: list[str]) -> None:
    """Print one table, with a line above the keys of each section."""
    columns = (Column("key", no_wrap=True), Column(f"in {recipe}", overflow="fold"), "meaning")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    keys = all_keys(config.world.name)
    for section in sections:
        table.add_row("", "", "")
        table.add_row(f"{section}:", "", "")
        for key, field in keys.items():
            if section_of(key) == section:
                value = format_value(lookup(config, key))
                table.add_row(key, "see above" if key == "schedule" and config.schedule else value, field.description)
    if config.schedule and RUN in sections:
        out.print(f"{recipe} has {', '.join(f'schedule.{schedule}' for schedule in config.schedule)}\n")
    out.print(table)


def _print_worlds(out: Console, besides: str) -> None:
    out.print(f"Worlds besides {besides}, by world=NAME; --help world=NAME describes their keys:\n")
    for name, kind in FAMILIES.items():
        if name != besides:
            keys = ", ".join(f"world.{key}" for key in keys_of(kind) if key not in ("name", "agents", "clip_reward"))
            out.print(f"{usage(name)}: {kind.__doc__}\n  {keys}")
    out.print("package.module:Class: your own world; its keys are the arguments of its constructor.\n")
