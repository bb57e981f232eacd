"""`holdfast train`: train a policy, or resume a run."""

import shlex
from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from holdfast.cli.allocator import keep_freed_memory
from holdfast.cli.arguments import Parser, add_trust_code, parse_overrides
from holdfast.config.run import all_keys, override
from holdfast.config.world_names import FAMILIES, usage
from holdfast.errors import ConfigError
from holdfast.recipes import DEFAULT, ELSEWHERE, RECIPES, find_recipe, recipe_for
from holdfast.report.text import best_returns_line, format_value, lookup
from holdfast.training.train import RunResult, train

TRACED = 42
"""The agent that `--trace` logs by default."""


def run_train(args: Sequence[str]) -> int:
    """Train, and print the result."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--resume", nargs="?", const="", action="append", default=[])
    add_trust_code(parser)
    options, rest = parser.parse_known_args(args)
    recipe, overrides = parse_overrides([_expand_trace(arg) for arg in rest])
    if options.help:
        world = overrides.get("world", overrides.get("world.name"))
        _print_help(recipe or recipe_for(world), world)
        return 0
    if len(options.resume) > 1 or "" in options.resume:
        raise ConfigError("Write --resume with one run's folder, for example: --resume runs/NAME.")
    keep_freed_memory()
    resume = next(iter(options.resume), None)
    command = shlex.join(["holdfast", "train", *args])
    run = train(recipe, overrides, resume=resume, trust_code=options.trust_code, command=command)
    _print_result(run)
    return 0 if run.finished else 1


def _expand_trace(arg: str) -> str:
    """Replace `--trace` and `--trace=7` by the key they stand for."""
    flag, equals, agent = arg.partition("=")
    if flag != "--trace":
        return arg
    return f"trace={agent}" if equals else f"trace={TRACED}"


def _print_result(run: RunResult) -> None:
    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if run.finished:
        for name, intact in run.metrics.items():
            if name.startswith("eval/return_mean") and "cleared" not in name:
                cleared = run.metrics[name.replace("return_mean", "return_mean_memory_cleared")]
                _, at, world = name.partition("@")
                prefix = f"{world}: " if at else ""
                out.print(f"{prefix}greedy return {intact:.3f} · with memory cleared every step {cleared:.3f}")
        if best_returns_line(run.spec):
            out.print(best_returns_line(run.spec))
    else:
        out.print(f"stopped; resume with: holdfast train --resume {shlex.quote(str(run.folder))}")
    if run.checkpoint is not None:
        out.print(f"weights {run.checkpoint}/model.safetensors")
    out.print(f"results {run.folder}")


def _print_help(recipe: str, world: str | None) -> None:
    """Print every key with its value in a recipe, for a world if one is named."""
    out = Console(highlight=False, markup=False, emoji=False)
    out.print("usage: holdfast train [RECIPE] key=value ...")
    out.print("       holdfast train --resume runs/NAME [key=value ...] [--trust-code]\n")
    out.print(f"Recipes: {', '.join(RECIPES)}.")
    out.print(
        f"The default is that of world=NAME, {ELSEWHERE} for environments of other packages, else {DEFAULT}. "
        "Integers may be written 1e6 or 5_000."
    )
    out.print("policy=NAME and py_agent=NAME mean policy.name=NAME; world=NAME means world.name=NAME.")
    out.print("agent=NAME is the same policy as a component graph; agent=FILE.yaml is your own graph.")
    out.print("schedule.KEY=KIND:END changes a value over the run, to END: linear, cosine, exponential,")
    out.print(f"logarithmic; constant: no schedule. --trace logs agent {TRACED}'s memory, --trace=N agent N's.")
    out.print("--trust-code imports the code that a resumed run or a teacher names, not only installed packages.\n")
    config = override(find_recipe(recipe), {"world": world} if world else {})
    _print_worlds(out, config.world.name)
    if config.schedule:
        schedules = ", ".join(f"schedule.{schedule}" for schedule in config.schedule)
        out.print(f"{recipe} has {schedules}\n")
    columns = (Column("key", no_wrap=True), Column(f"in {recipe}", overflow="fold"), "meaning")
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for key, field in all_keys(config.world.name).items():
        value = format_value(lookup(config, key))
        table.add_row(key, "see above" if key == "schedule" and config.schedule else value, field.description)
    out.print(table)


def _print_worlds(out: Console, besides: str) -> None:
    out.print(f"Worlds besides {besides}, by world=NAME; --help world=NAME describes their keys:\n")
    for name, kind in FAMILIES.items():
        if name != besides:
            keys = ", ".join(f"world.{key}" for key in kind.model_fields if key not in ("name", "agents"))
            out.print(f"{usage(name)}: {kind.__doc__}\n  {keys}")
    out.print("package.module:Class: your own world; its keys are the arguments of its constructor.\n")
