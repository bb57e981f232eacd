"""`holdfast bench memory`: time memory cells against torch's dense call and other implementations."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from holdfast.bench.cases import CELLS, CPU_STARTS, GPU_STARTS, ON_CPU, PRECISIONS, TARGETS, Precision, cases_of
from holdfast.bench.implementations import IMPLEMENTATIONS, ON_GPU_ONLY
from holdfast.bench.memory import Bench, CaseResult, measure
from holdfast.bench.processes import combined, in_processes
from holdfast.bench.report import lines_of, meaning, processes_table, speed_table
from holdfast.bench.timing import name_of, versions
from holdfast.build import select_device
from holdfast.cli.allocator import keep_freed_memory
from holdfast.cli.arguments import Parser, count, one_of, output_file
from holdfast.config.run import Config
from holdfast.errors import ConfigError

TARGET = "memory"
LOOPS = ("train", "rollout", "update")
"""Targets that have options of their own, see bench_loop.py."""
ROUNDS = {"cpu": 15, "cuda": 40}
QUICK = 5
FILE_WIDTH = 170
"""Width of a table that is not printed to a terminal."""


def run_bench(args: Sequence[str]) -> int:
    """Measure all cases and print a table; return 1 if one of our cells is wrong."""
    if args and args[0] in LOOPS:
        from holdfast.cli.bench_loop import run_loop

        return run_loop(args[0], args[1:])
    options = _parser().parse_args(args)
    if options.what is None:
        raise ConfigError(
            f"holdfast bench: nothing to measure is named; type: holdfast bench {TARGET}, or train, rollout or update."
        )
    file = None if options.json is None else output_file(options.json, "--json")
    device = select_device(Config(device=options.device))
    out = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else FILE_WIDTH)
    bench, outcomes = _bench(options, device), []
    starts = options.starts or (GPU_STARTS if options.quick else [])
    sizes = (options.hidden or [], options.batch or [], options.steps or [], options.layers)
    cases = cases_of(device, options.cell or [], *sizes, starts)[: 1 if options.quick else None]
    if options.processes is not None:
        return _run_processes(options, file, device, out, len(cases))
    for name in _gpu_only(options, device):
        _log(f"{name} is skipped: {ON_GPU_ONLY[name]}")
    if device.type == "cpu":
        # As in training: one thread, and freed memory is not returned to the system.
        torch.set_num_threads(1)
        keep_freed_memory()
    num_cases = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
    _log(f"{name_of(device)} · torch {torch.__version__} · {num_cases}")
    for case in cases:
        outcomes.append(measure(bench, case))
        _log_result(outcomes)
        if file is not None:
            # After every case, so that an interrupted benchmark has its results.
            good = all(outcome.good for outcome in outcomes)
            cases_as_json = [outcome.as_json() for outcome in outcomes]
            _write(file, device, {"threads": torch.get_num_threads(), "good": good, "cases": cases_as_json})
    return _print_table(outcomes, out)


def _print_table(outcomes: Sequence[CaseResult], out: Console) -> int:
    """Print the table; return 1 if one of our cells is wrong or failed."""
    good = all(outcome.good for outcome in outcomes)
    if good and not any(outcome.measured for outcome in outcomes):
        raise ConfigError("Nothing could be measured, for the reasons above; choose others: --implementations dense.")
    out.print(speed_table(outcomes, out.width))
    out.print(meaning(outcomes), markup=False)
    return 0 if good else 1


def _log_result(outcomes: Sequence[CaseResult]) -> None:
    """Log the last case; skipped implementations are logged once per reason."""
    *before, last = outcomes
    logged = {skipped for outcome in before for skipped in outcome.skipped}
    for line in (*lines_of(last), *(skipped.line() for skipped in last.skipped if skipped not in logged)):
        _log(line)


def _run_processes(
    options: argparse.Namespace, file: Path | None, device: torch.device, out: Console, cases: int
) -> int:
    """Measure in several fresh processes, one after the other."""
    runs = []
    for run in in_processes(_to_args(options), options.processes, cases, _log):
        runs.append(run)
        if file is not None:
            _write(file, device, {"processes": combined(runs), "runs": runs})
    out.print(processes_table(combined(runs)))
    return 0 if all(run["good"] for run in runs) else 1


def _to_args(options: argparse.Namespace) -> list[str]:
    """Return the options as arguments, without --processes and --json."""
    args = ["--quick"] if options.quick else []
    for name, value in vars(options).items():
        if name not in ("what", "quick", "processes", "json") and value is not None:
            args += [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    return args


def _bench(options: argparse.Namespace, device: torch.device) -> Bench:
    default: Precision = "bfloat16" if device.type == "cuda" else "float32"
    precisions: list[Precision] = options.precision or [default]
    if device.type == "cpu" and precisions != ["float32"]:
        raise ConfigError(
            f"--precision {','.join(precisions)}: a CPU measures float32 only; leave it out, or use --device cuda."
        )
    skipped = _gpu_only(options, device)
    if options.implementations and len(skipped) == len(options.implementations):
        reasons = " ".join(f"{name}: {ON_GPU_ONLY[name]}" for name in skipped)
        raise ConfigError(f"--implementations {','.join(skipped)}: none runs on a CPU. {reasons} Try holdfast,dense.")
    rounds = options.rounds or (QUICK if options.quick else ROUNDS[device.type])
    return Bench(device, options.implementations or list(IMPLEMENTATIONS), precisions, rounds, log=_progress)


def _gpu_only(options: argparse.Namespace, device: torch.device) -> list[str]:
    """List the requested implementations that this device cannot run."""
    return [name for name in options.implementations or [] if device.type == "cpu" and name in ON_GPU_ONLY]


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast bench",
        usage="holdfast bench memory [options]\n"
        "       holdfast bench train|rollout|update [RECIPE] [key=value ...] [options]",
        description="Time our memory cells, forward and backward, with episode starts inside segments, "
        "against torch's dense call without resets, a loop over steps and TorchRL's kernel (if installed), "
        "in turns. An option that takes a LIST replaces that default; all combinations are measured.",
    )
    precisions = (
        f"some of {','.join(PRECISIONS)} (bfloat16 on a GPU, where dense also runs in float16; a CPU runs float32 only)"
    )
    hidden, gpu_hidden = (_join(hidden for hidden, _ in sizes) for sizes in (ON_CPU, TARGETS))
    batch, gpu_batch = (_join(sorted({B for _, rows in sizes for B in rows})) for sizes in (ON_CPU, TARGETS))
    largest = "the largest not with the largest hidden size, unless either is set"
    starts = f"fractions of steps that start an episode ({_join(CPU_STARTS)}; on a GPU {_join(GPU_STARTS)})"
    implementations = f"implementations: some of {','.join(IMPLEMENTATIONS)} (all)"
    counts = {"type": _comma_list(count), "metavar": "LIST"}
    add = parser.add_argument
    add("what", nargs="?", type=one_of([TARGET, *LOOPS]), metavar=TARGET, help="what to measure")
    add("--cell", type=_comma_list(one_of(CELLS)), metavar="LIST", help="lstm,gru (both on a GPU, lstm elsewhere)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="device (auto)")
    add("--precision", type=_comma_list(one_of(PRECISIONS)), metavar="LIST", help=precisions)
    add("--hidden", **counts, help=f"hidden sizes ({hidden}; on a GPU {gpu_hidden})")
    add("--batch", **counts, help=f"batch sizes ({batch}; on a GPU {gpu_batch}, {largest})")
    add("--steps", **counts, help="steps of a segment (64)")
    add("--layers", type=count, default=1, metavar="N", help="layers (1)")
    add("--starts", type=_comma_list(_fraction), metavar="LIST", help=starts)
    add("--implementations", type=_comma_list(one_of(tuple(IMPLEMENTATIONS))), metavar="LIST", help=implementations)
    add("--rounds", type=count, metavar="N", help=f"timings of each ({ROUNDS['cpu']}, on a GPU {ROUNDS['cuda']})")
    add("--quick", action="store_true", help=f"{QUICK} rounds of the first case, {_join(GPU_STARTS)} starts")
    add("--processes", type=count, metavar="N", help="repeat the benchmark in N fresh processes")
    add("--json", metavar="FILE", help="write all results to this file, after every case or process")
    return parser


def _join(numbers: Iterable[int | float]) -> str:
    return ",".join(f"{number:g}" for number in numbers)


def _comma_list(read: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Parse a comma-separated list."""
    return lambda text: [read(word.strip()) for word in text.split(",")]


def _fraction(text: str) -> float:
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise argparse.ArgumentTypeError(f"{text}: give a fraction from 0 to 1, such as 0.02")
    return fraction


def _write(file: Path, device: torch.device, results: dict[str, Any]) -> None:
    """Write results with the date, the machine and its software."""
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    text = json.dumps({"date": date, "device": name_of(device), "versions": versions(), **results}, indent=2)
    file.write_text(text, encoding="utf-8")


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _progress(line: str) -> None:
    """Show progress on a terminal; the next line replaces it."""
    if sys.stderr.isatty():
        print(f"\r{line:<100}", end="\r", file=sys.stderr, flush=True)
