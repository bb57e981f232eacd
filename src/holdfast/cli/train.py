"""`holdfast train`: train a policy that remembers."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from holdfast.cli.allocator import keep_freed_memory
from holdfast.cli.keys import parse_words
from holdfast.config import change, keys_of
from holdfast.errors import ConfigError
from holdfast.knobs import WORLD_KNOBS
from holdfast.mettagrid_knobs import METTAGRID_KNOBS, MettaGridKnobs
from holdfast.recipes import DEFAULT, ELSEWHERE, RECIPES, find_recipe, recipe_for
from holdfast.report import lookup, typed
from holdfast.train import Run, train
from holdfast.which_world import DOOR_NAMES, MIXTURE, MixtureKnobs

HELP = ("-h", "--help")
TRACED = 42
"""Whose life `--trace` tells if nobody is named."""


def run_train(words: Sequence[str]) -> int:
    """Train and say what came of it."""
    resume, rest = _resume_of(words)
    recipe, keys = parse_words([_key_of(word) for word in rest if word not in HELP])
    if any(word in HELP for word in words):
        world = keys.get("world", keys.get("world.name"))
        _print_help(recipe or recipe_for(world), world)
        return 0
    command = shlex.join(["holdfast", "train", *words])
    keep_freed_memory()
    run = train(recipe, keys, resume=resume, command=command)
    _print_result(run)
    return 0 if run.finished else 1


def _resume_of(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Take `--resume FOLDER`, or `--resume=FOLDER`, out of the words."""
    rest, found = list(words), list[str]()
    for word in words:
        flag, equals, folder = word.partition("=")
        if flag == "--resume":
            place = rest.index(word)
            folder = folder if equals else "".join(rest[place + 1 : place + 2])
            del rest[place : place + (1 if equals else 2)]
            found.append(folder)
    if len(found) > 1 or "" in found:
        raise ConfigError("Write --resume with one run's folder, for example: --resume runs/NAME.")
    return (found[0] if found else None), rest


def _key_of(word: str) -> str:
    """Take `--trace` and `--trace=7` for the key they mean."""
    flag, equals, agent = word.partition("=")
    if flag != "--trace":
        return word
    return f"trace={agent}" if equals else f"trace={TRACED}"


def _print_result(run: Run) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if run.finished:
        for name, intact in run.metrics.items():
            if name.startswith("eval/return_mean") and "cleared" not in name:
                cleared = run.metrics[name.replace("return_mean", "return_mean_memory_cleared")]
                _, at, world = name.partition("@")
                where = f"{world}: " if at else ""
                out.print(
                    f"{where}greedy return {intact:.3f} · with its memory cleared every step {cleared:.3f}"
                )
        bests = {
            "the best there is": run.spec.best_return,
            "the best without memory": run.spec.best_return_without_memory,
        }
        known = [f"{name} {best:.3f}" for name, best in bests.items() if best is not None]
        if known:
            out.print(" · ".join(known))
    else:
        out.print(f"stopped; it goes on by: holdfast train --resume {shlex.quote(str(run.folder))}")
    if run.checkpoint is not None:
        out.print(f"weights {run.checkpoint}/model.safetensors")
    out.print(f"results {run.folder}")


def _print_help(name: str, world: str | None) -> None:
    """Tell every key, with its value in a recipe, for a world if one is named."""
    out = Console(highlight=False, markup=False, emoji=False)
    out.print("usage: holdfast train [RECIPE] key=value ...")
    out.print("       holdfast train --resume runs/NAME [key=value ...]\n")
    out.print(f"Recipes: {', '.join(RECIPES)}.")
    out.print(
        f"Without one it is that of world=NAME, {ELSEWHERE} for worlds of others, else {DEFAULT}. "
        "Whole numbers may be 1e6 or 5_000."
    )
    out.print(
        "policy=NAME means policy.name=NAME, and so does py_agent=NAME; world=NAME means world.name=NAME."
    )
    out.print("agent=NAME is the same policy as a component graph; agent=FILE.yaml is one of your own.")
    out.print("schedule.KEY=KIND:END lets a number go from its value to END: linear, cosine, exponential,")
    out.print(
        f"logarithmic, or constant again. --trace tells the life of agent {TRACED}, --trace=N of another.\n"
    )
    config = change(find_recipe(name), {"world": world} if world else {})
    _print_worlds(out, config.world.name)
    if config.schedule:
        out.print(f"{name} has {', '.join(f'schedule.{each}' for each in config.schedule)}\n")
    table = Table(
        Column("key", no_wrap=True),
        Column(f"in {name}", overflow="fold"),
        "meaning",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for key, field in keys_of(config.world.name).items():
        value = typed(lookup(config, key))
        table.add_row(key, "see above" if key == "schedule" and config.schedule else value, field.description)
    out.print(table)


def _print_worlds(out: Console, besides: str) -> None:
    out.print(f"Worlds besides {besides}, by world=NAME; with --help world=NAME their keys are told below:\n")
    others = {**DOOR_NAMES, **METTAGRID_KNOBS, "mettagrid:package.module:function": MettaGridKnobs}
    for name, kind in {**WORLD_KNOBS, **others, MIXTURE: MixtureKnobs}.items():
        if name != besides:
            keys = ", ".join(f"world.{key}" for key in kind.model_fields if key not in ("name", "agents"))
            out.print(f"{name}: {kind.__doc__}\n  {keys}")
    out.print("package.module:Class: a world of your own; its keys are what it is made with.\n")
