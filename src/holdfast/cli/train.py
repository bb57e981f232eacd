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
from holdfast.errors import ConfigError, OtherRankError
from holdfast.launcher import launched_ranks
from holdfast.recipes import find_recipe, recipe_for
from holdfast.report import SEEDS
from holdfast.trust import current_source, names_from, trusting

if TYPE_CHECKING:
    from holdfast.training.train import RunResult


def run_train(args: Sequence[str]) -> int:
    """Train, and print the result."""
    options, rest = _parser().parse_known_args(args)
    with trusting(options.trust_code), names_from(options.names_from or current_source()):
        return _train(options, rest, shlex.join(["holdfast", "train", *args]))


def _train(options: argparse.Namespace, rest: Sequence[str], command: str) -> int:
    is_main = os.environ.get("RANK", "0") == "0"
    try:
        recipe, overrides, group = _read(options, rest)
    except ConfigError as error:
        if is_main:
            raise
        # All ranks have the same arguments.
        raise OtherRankError(str(error)) from error
    if options.help:
        print_help(recipe, overrides.get("world", overrides.get("world.name")))
        return 0
    if "seeds" in overrides or group is not None:
        return train_many(recipe, overrides, group, trust_code=bool(options.trust_code))
    if options.gpus or options.ranks:
        return _launch(options, rest)
    from holdfast.training.train import train

    keep_freed_memory()
    resume = next(iter(options.resume), None)
    run = train(recipe, overrides, resume=resume, trust_code=options.trust_code, command=command)
    if is_main:
        _print_result(run)
    return 0 if run.finished else 1


def _parser() -> Parser:
    parser = Parser(prog="holdfast train", add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--resume", nargs="?", const="", action="append", default=[])
    parser.add_argument("--ranks", type=count)
    parser.add_argument("--gpus", type=count)
    parser.add_argument("--max-restarts", type=count, default=0)
    # Of `seeds=` alone: the folder whose seeds.json has the keys.
    parser.add_argument("--names-from", type=Path)
    add_trust_code(parser)
    return parser


def _read(options: argparse.Namespace, rest: Sequence[str]) -> tuple[str | None, dict[str, str], Path | None]:
    """Read recipe, keys, and the folder of several seeds to resume, before torch is imported, which takes seconds."""
    recipe, overrides = parse_overrides([_expand_trace(arg) for arg in rest])
    if options.help:
        return recipe, overrides, None
    if len(options.resume) > 1 or "" in options.resume:
        raise ConfigError("Write --resume with one run's folder, for example: --resume runs/NAME.")
    group = next((Path(name) for name in options.resume if (Path(name) / SEEDS).is_file()), None)
    number = _require_one_launcher(options, launched_ranks(), several_seeds="seeds" in overrides or group is not None)
    if not options.resume and "seeds" not in overrides:
        base = find_recipe(recipe or recipe_for(overrides.get("world", overrides.get("world.name"))))
        require_ranks(override(base, overrides), number)
    return recipe, overrides, group


def _require_one_launcher(options: argparse.Namespace, launched: int, *, several_seeds: bool) -> int:
    """Return the number of ranks; require that one launcher starts them, and only for one seed."""
    flags = [f"--{name} {value}" for name in ("gpus", "ranks") if (value := getattr(options, name))]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} are two numbers of ranks; keep one.")
    if launched > 1 and flags:
        raise ConfigError(f"A launcher such as torchrun has started {launched} ranks already; leave out {flags[0]}.")
    if several_seeds and (flags or launched > 1):
        raise ConfigError(
            f"Each of several seeds trains in one process; leave out {flags[0] if flags else 'torchrun'}, or train one "
            "seed: seed=0."
        )
    if options.max_restarts and not flags:
        raise ConfigError("--max-restarts needs --ranks N or --gpus N; torchrun has its own.")
    return options.gpus or options.ranks or launched


def _launch(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Start the ranks of this machine, each with the same keys."""
    from holdfast.cli.launch import launch, require_gpus

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
