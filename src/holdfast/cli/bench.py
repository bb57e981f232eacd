"""`holdfast bench memory`: what remembering costs, against torch's dense call and others."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from holdfast.bench import CELLS, PRECISIONS, RIVALS, Bench, Outcome, Precision, measure
from holdfast.bench.cases import ON_CPU, TARGETS, Case, Sizes, cases_of
from holdfast.bench.processes import combined, in_processes
from holdfast.bench.rivals import ON_GPU_ONLY
from holdfast.bench.where import name_of, versions
from holdfast.build import pick_device
from holdfast.cli.allocator import keep_freed_memory
from holdfast.cli.parser import Parser, count
from holdfast.config import Config
from holdfast.errors import ConfigError, did_you_mean
from holdfast.report.speed import lines_of, meaning, processes_table, speed_table

WHAT = "memory"
ROUNDS = {"cpu": 15, "cuda": 40}
QUICK = 5
SHARE, STARTS = 0.02, (0.0, 0.02, 0.1)
"""Shares of steps that are starts: on a GPU, where they cost nothing, and on a CPU."""
WIDE = 170
"""Columns of a table that goes into a file."""


def run_bench(words: Sequence[str]) -> int:
    """Measure case by case, tell each as it comes, then all in a table; 1 if one of ours is wrong."""
    given = _parser().parse_args(words)
    if given.what is None:
        raise ConfigError(f"holdfast bench: say what to measure; there is {WHAT}: holdfast bench {WHAT}.")
    if given.what != WHAT:
        raise ConfigError(
            f"holdfast bench {given.what}: {did_you_mean(given.what, [WHAT], f'there is {WHAT}.')}"
        )
    file = None if given.json is None else _file_for(given.json)
    device = pick_device(Config(device=given.device))
    out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else WIDE)
    bench, cases, outcomes = _bench(given, device), _cases(given, device), []
    if given.processes is not None:
        return _several(given, file, device, out, len(cases))
    for name in _absent(given, device):
        _to_stderr(f"{name} is left out: {ON_GPU_ONLY[name]}")
    if device.type == "cpu":
        # As in training: more of them wait for each other, and memory that was freed is kept.
        torch.set_num_threads(1)
        keep_freed_memory()
    many = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
    _to_stderr(f"{name_of(device)} · torch {torch.__version__} · {many}")
    for case in cases:
        outcomes.append(measure(bench, case))
        _tell(outcomes)
        if file is not None:
            # After every case: who is interrupted has what was measured.
            _write(file, _as_json(device, outcomes))
    return _end(outcomes, out)


def _end(outcomes: Sequence[Outcome], out: Console) -> int:
    """Lay all cases out in a table; 1 if one of ours is wrong or failed."""
    good = all(outcome.good for outcome in outcomes)
    if good and not any(outcome.measured for outcome in outcomes):
        raise ConfigError("Nothing could be measured, for the reasons above; ask for others: --rivals dense.")
    out.print(speed_table(outcomes, out.width))
    out.print(meaning(outcomes), markup=False)
    return 0 if good else 1


def _tell(outcomes: Sequence[Outcome]) -> None:
    """Tell the last case; whoever is left out again for the same reason was told before."""
    *before, last = outcomes
    told = {absent for outcome in before for absent in outcome.left_out}
    for line in (*lines_of(last), *(absent.line() for absent in last.left_out if absent not in told)):
        _to_stderr(line)


def _several(
    given: argparse.Namespace, file: Path | None, device: torch.device, out: Console, cases: int
) -> int:
    """Measure in fresh processes, one after the other."""
    runs = []
    for run in in_processes(_again(given), given.processes, cases, _to_stderr):
        runs.append(run)
        if file is not None:
            _write(file, {**_about(device), "processes": combined(runs), "runs": runs})
    out.print(processes_table(combined(runs)))
    return 0 if all(run["good"] for run in runs) else 1


def _again(given: argparse.Namespace) -> list[str]:
    """Say the same in words, but for the number of processes and the file."""
    words = ["--quick"] if given.quick else []
    for name, value in vars(given).items():
        if name not in ("what", "quick", "processes", "json") and value is not None:
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return words


def _bench(given: argparse.Namespace, device: torch.device) -> Bench:
    usual: Precision = "bfloat16" if device.type == "cuda" else "float32"
    precisions: list[Precision] = given.precision or [usual]
    if device.type == "cpu" and precisions != ["float32"]:
        raise ConfigError(
            f"--precision {','.join(precisions)}: on a CPU float32 is measured; leave it out, or use "
            "--device cuda."
        )
    absent = _absent(given, device)
    if given.rivals and len(absent) == len(given.rivals):
        why = " ".join(f"{name}: {ON_GPU_ONLY[name]}" for name in absent)
        raise ConfigError(
            f"--rivals {','.join(absent)}: none is measured here. {why} Try --rivals holdfast,dense."
        )
    rounds = given.rounds or (QUICK if given.quick else ROUNDS[device.type])
    return Bench(device, given.rivals or list(RIVALS), precisions, rounds, say=_passing)


def _absent(given: argparse.Namespace, device: torch.device) -> list[str]:
    """List who was asked for by name and cannot be measured on this device."""
    return [name for name in given.rivals or [] if device.type == "cpu" and name in ON_GPU_ONLY]


def _cases(given: argparse.Namespace, device: torch.device) -> list[Case]:
    on_gpu = device.type == "cuda"
    several = [SHARE] if on_gpu or given.quick else STARTS
    cases = cases_of(
        device,
        given.cell or (CELLS if on_gpu else CELLS[:1]),
        given.hidden or [],
        given.batch or [],
        given.steps or [64],
        given.layers,
        given.starts or several,
    )
    # The first of each list.
    return cases[:1] if given.quick else cases


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast bench",
        usage="holdfast bench memory [options]",
        description="Time our memory cells forwards and backwards, with starts inside segments, against "
        "torch's dense call without them, a loop over steps and, where it is installed, TorchRL's kernel: in "
        "one run, in turns. An option that takes a LIST replaces that list alone; all are put together.",
    )
    add = parser.add_argument
    add("what", nargs="?", metavar=WHAT, help="what to measure")
    add("--cell", type=_each(_one_of(CELLS)), metavar="LIST", help="lstm,gru (both on a GPU, lstm elsewhere)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where to compute (auto)")
    add(
        "--precision",
        type=_each(_one_of(PRECISIONS)),
        metavar="LIST",
        help=f"some of {','.join(PRECISIONS)} (bfloat16 on a GPU, where dense is measured in float16 too; "
        "on a CPU there is float32 alone)",
    )
    _add_sizes(parser)
    add(
        "--rivals",
        type=_each(_one_of(tuple(RIVALS))),
        metavar="LIST",
        help=f"some of {','.join(RIVALS)} (all)",
    )
    add(
        "--rounds",
        type=count,
        metavar="N",
        help=f"how often each is timed ({ROUNDS['cpu']}, on a GPU {ROUNDS['cuda']})",
    )
    add("--quick", action="store_true", help=f"{QUICK} rounds, and the first of each list; {SHARE} starts")
    add("--processes", type=count, metavar="N", help="measure it all in so many fresh processes")
    add("--json", metavar="FILE", help="write all figures to this file, after every case or process")
    return parser


def _add_sizes(parser: Parser) -> None:
    add = parser.add_argument
    add(
        "--hidden",
        type=_each(count),
        metavar="LIST",
        help=f"hidden sizes ({_hidden(ON_CPU)}; on a GPU {_hidden(TARGETS)})",
    )
    add(
        "--batch",
        type=_each(count),
        metavar="LIST",
        help=f"rows of a segment ({_rows(ON_CPU)}; on a GPU {_rows(TARGETS)}, the largest not with the "
        "largest hidden size unless one of the two is given)",
    )
    add("--steps", type=_each(count), metavar="LIST", help="steps of a row (64)")
    add("--layers", type=count, default=1, metavar="N", help="layers (1)")
    add(
        "--starts",
        type=_each(_share),
        metavar="LIST",
        help=f"shares of steps that are starts ({','.join(f'{share:g}' for share in STARTS)}; "
        f"on a GPU {SHARE})",
    )


def _hidden(usual: Sizes) -> str:
    return ",".join(str(hidden) for hidden, _ in usual)


def _rows(usual: Sizes) -> str:
    return ",".join(str(rows) for rows in sorted({rows for _, each in usual for rows in each}))


def _each(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Read several, with commas between them."""
    return lambda text: [read(word.strip()) for word in text.split(",")]


def _one_of(known: Sequence[str]) -> Callable[[str], str]:
    def read(word: str) -> str:
        meant = word.replace("-", " ")
        if meant not in known:
            hint = did_you_mean(meant, known, f"there is {', '.join(known)}")
            raise argparse.ArgumentTypeError(f"{word}: {hint.rstrip('.')}")
        return meant

    return read


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a share from 0 to 1, such as 0.02")
    return share


def _file_for(name: str) -> Path:
    """Say where figures go, before anybody waits for them."""
    file = Path(name)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written; name a file in a folder that exists: --json FILE.")
    return file


def _write(file: Path, told: dict[str, Any]) -> None:
    file.write_text(json.dumps(told, indent=2), encoding="utf-8")


def _as_json(device: torch.device, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        **_about(device),
        "threads": torch.get_num_threads(),
        "good": all(outcome.good for outcome in outcomes),
        "cases": [outcome.as_json() for outcome in outcomes],
    }


def _about(device: torch.device) -> dict[str, Any]:
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "device": name_of(device),
        "versions": versions(),
    }


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _passing(line: str) -> None:
    """Say what goes on, to people only; the next line takes its place."""
    if sys.stderr.isatty():
        print(f"\r{line:<100}", end="\r", file=sys.stderr, flush=True)
