"""`holdfast train`: train a policy that remembers."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from holdfast.cli.keys import parse_words
from holdfast.config import keys_of
from holdfast.knobs import WORLD_KNOBS
from holdfast.recipes import DEFAULT, ELSEWHERE, RECIPES, find_recipe
from holdfast.report import lookup, typed
from holdfast.train import Run, train
from holdfast.which_world import MIXTURE, GymKnobs, MixtureKnobs


def run_train(words: Sequence[str]) -> int:
    """Train and say what came of it."""
    if "-h" in words or "--help" in words:
        _print_help()
        return 0
    recipe, keys = parse_words(words)
    command = shlex.join(["holdfast", "train", *words])
    run = train(recipe, keys, command=command)
    _print_result(run)
    return 0 if run.finished else 1


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
        out.print("stopped; what was learnt until the last whole iteration is saved.")
    out.print(f"weights {run.checkpoint}/model.safetensors")
    out.print(f"results {run.folder}")


def _print_help() -> None:
    out = Console(highlight=False, markup=False, emoji=False)
    out.print("usage: holdfast train [RECIPE] key=value ...\n")
    out.print(f"Recipes: {', '.join(RECIPES)}.")
    out.print(
        f"Without one it is that of world=NAME, {ELSEWHERE} for worlds of others, else {DEFAULT}. "
        "Whole numbers may be 1e6 or 5_000."
    )
    out.print(
        "policy=NAME means policy.name=NAME, and so does py_agent=NAME; world=NAME means world.name=NAME."
    )
    out.print("agent=NAME is the same policy as a component graph; agent=FILE.yaml is one of your own.\n")
    recipe = find_recipe(DEFAULT)
    out.print("Worlds besides recall, by world=NAME, and their keys:\n")
    for name, kind in WORLD_KNOBS.items():
        if name != recipe.world.name:
            keys = ", ".join(f"world.{key}" for key in kind.model_fields if key not in ("name", "agents"))
            out.print(f"{name}: {kind.__doc__}\n  {keys}")
    for name, kind in {"gym:ID": GymKnobs, MIXTURE: MixtureKnobs}.items():
        out.print(f"{name}: {kind.__doc__}")
        for key, field in kind.model_fields.items():
            if key not in ("name", "agents"):
                out.print(f"  world.{key}: {field.description}")
    out.print("package.module:Class: a world of your own; its keys are what it is made with.\n")
    table = Table(
        Column("key", no_wrap=True),
        Column(f"in {DEFAULT}", overflow="fold"),
        "meaning",
        box=None,
        padding=(0, 2, 0, 0),
    )
    for key, field in keys_of().items():
        table.add_row(key, typed(lookup(recipe, key)), field.description)
    out.print(table)
