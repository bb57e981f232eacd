"""`holdfast train`: train a policy, or resume a run."""

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from holdfast.cli.allocator import keep_freed_memory
from holdfast.cli.arguments import Parser, add_trust_code, count, parse_overrides
from holdfast.cli.train_help import TRACED, print_help
from holdfast.cli.train_seeds import train_many
from holdfast.config.run import override, require_ranks
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe, recipe_for
from holdfast.report import SEEDS
from holdfast.trust import current_source, names_from, trusting

if TYPE_CHECKING:
    from holdfast.training.train import RunResult


def run_train(args: Sequence[str]) -> int:
    """Train, and print the result."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--resume", nargs="?", const="", action="append", default=[])
    parser.add_argument("--ranks", type=count)
    parser.add_argument("--gpus", type=count)
    parser.add_argument("--max-restarts", type=int, default=0)
    # Of `seeds=` alone: the folder whose seeds.json has the keys.
    parser.add_argument("--names-from", type=Path)
    add_trust_code(parser)
    options, rest = parser.parse_known_args(args)
    with trusting(options.trust_code), names_from(options.names_from or current_source()):
        return _train(options, rest, shlex.join(["holdfast", "train", *args]))


def _train(options: argparse.Namespace, rest: Sequence[str], command: str) -> int:
    recipe, overrides = parse_overrides([_expand_trace(arg) for arg in rest])
    if options.help:
        print_help(recipe, overrides.get("world", overrides.get("world.name")))
        return 0
    if len(options.resume) > 1 or "" in options.resume:
        raise ConfigError("Write --resume with one run's folder, for example: --resume runs/NAME.")
    group = next((Path(name) for name in options.resume if (Path(name) / SEEDS).is_file()), None)
    if "seeds" in overrides or group is not None:
        return train_many(recipe, overrides, group, trust_code=bool(options.trust_code))
    if not options.resume:
        # A typo is answered before torch is imported, which takes seconds.
        base = find_recipe(recipe or recipe_for(overrides.get("world", overrides.get("world.name"))))
        require_ranks(override(base, overrides), options.gpus or options.ranks or 1)
    if options.gpus or options.ranks:
        return _launch(options, rest)
    from holdfast.training.train import train

    keep_freed_memory()
    resume = next(iter(options.resume), None)
    run = train(recipe, overrides, resume=resume, trust_code=options.trust_code, command=command)
    if os.environ.get("RANK", "0") == "0":
        _print_result(run)
    return 0 if run.finished else 1


def _launch(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Start the ranks of this machine, each with the same keys."""
    from holdfast.cli.launch import launch, require_gpus

    if options.gpus and options.ranks:
        raise ConfigError(f"--gpus {options.gpus} and --ranks {options.ranks} are two numbers of ranks; keep one.")
    if options.gpus:
        require_gpus(options.gpus)
    resume = [word for run in options.resume for word in ("--resume", run)]
    trust = ["--trust-code"] * bool(options.trust_code)
    return launch(options.gpus or options.ranks, [*resume, *trust, *rest], max_restarts=options.max_restarts)


def _expand_trace(arg: str) -> str:
    """Replace `--trace` and `--trace=7` by the key they stand for."""
    flag, equals, agent = arg.partition("=")
    if flag != "--trace":
        return arg
    return f"trace={agent}" if equals else f"trace={TRACED}"


def _print_result(run: "RunResult") -> None:
    from holdfast.report.text import best_returns_line

    out = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if run.finished:
        for name, intact in run.summary.items():
            if name.startswith("eval/return_mean") and "cleared" not in name:
                cleared = run.summary[name.replace("return_mean", "return_mean_memory_cleared")]
                sampled = run.summary[name.replace("return_mean", "sampled_return_mean")]
                _, at, world = name.partition("@")
                prefix = f"{world}: " if at else ""
                out.print(
                    f"{prefix}greedy return {intact:.3f} · sampled return {sampled:.3f} · "
                    f"greedy with memory cleared every step {cleared:.3f}"
                )
        if best_returns_line(run.spec):
            out.print(best_returns_line(run.spec))
    else:
        out.print(f"stopped; resume with: holdfast train --resume {shlex.quote(str(run.folder))}")
    if run.checkpoint is not None:
        out.print(f"weights {run.checkpoint}/model.safetensors")
    out.print(f"results {run.folder}")
    if run.report is not None:
        out.print(f"report {run.report}")
