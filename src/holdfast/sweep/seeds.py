"""Train several seeds of one config: in parallel on CPUs, in turns on a GPU; then one table and one report."""

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from holdfast.build import select_device
from holdfast.checkpoint.run_dir import RunDir, new_folder
from holdfast.config.run import Config
from holdfast.report.report_page import MAX_RUNS, write_report
from holdfast.sweep.processes import exit_reason, last_line, stop_all, terminating_cleanly
from holdfast.sweep.seed_results import (
    CPU,
    GPU,
    Results,
    SeedsPlan,
    results_table,
    run_result,
    scores_line,
    write_results,
)

POLL_S, LINE_S = 0.5, 30.0
TAIL_BYTES = 1 << 14


@dataclass
class SeedRun:
    """The run of one seed."""

    seed: int
    folder: Path
    earlier_cost: float = 0.0
    """Of processes that were interrupted."""
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0

    @property
    def log(self) -> Path:
        """What the run prints."""
        return self.folder.with_name(f"{self.folder.name}.log")


def new_plan(config: Config, arguments: list[str], seeds: Sequence[int]) -> tuple[Path, SeedsPlan]:
    """Create the folder of several seeds."""
    name = config.run or f"{config.world.name.replace(':', '-').replace('/', '-')}-{datetime.now():%Y%m%d-%H%M%S}"
    plan = SeedsPlan(arguments, list(seeds), GPU if select_device(config).type == "cuda" else CPU)
    folder = new_folder(config, name)
    write_results(folder, plan, {})
    return folder, plan


def train_seeds(
    folder: Path, plan: SeedsPlan, results: Results, config: Config, *, options: Sequence[str] = (), out: Console
) -> bool:
    """Train or resume the seeds that are not finished; return whether all are. `options` go to each run."""
    waiting = [
        SeedRun(seed, folder / f"seed{seed}", results.get(seed, {}).get(plan.unit, 0.0))
        for seed in plan.seeds
        if not results.get(seed, {}).get("finished")
    ]
    slots = _slots(config, plan.unit)
    out.print(
        f"{folder}: {len(waiting)} of {len(plan.seeds)} seeds to train, {min(len(slots), len(waiting))} at a time"
    )
    try:
        with terminating_cleanly(), _display(waiting, results, config, out) as show:
            for run, code, cost in _run_all(waiting, slots, [*plan.arguments], options, plan.unit, show):
                error = "" if code == 0 else f"{exit_reason(code)}: {last_line(run.log)}"
                results[run.seed] = run_result(run.folder, plan.unit, cost, error, finished=code == 0)
                write_results(folder, plan, results)
                if error:
                    out.print(f"seed {run.seed} failed; it {error} (all of its output: {run.log})")
    except KeyboardInterrupt:
        running = [run for run in waiting if run.process is not None and run.process.poll() is None]
        costs = [run.earlier_cost + _cost_of(run, plan.unit) for run in running]
        stop_all([run.process for run in running if run.process is not None], out.print)
        for run, cost in zip(running, costs, strict=True):
            results[run.seed] = run_result(run.folder, plan.unit, cost, "interrupted", finished=False)
        write_results(folder, plan, results)
        out.print(f"stopped; resume with: holdfast train --resume {shlex.quote(str(folder))}")
        return False
    out.print(results_table(plan, results))
    out.print(scores_line(results))
    if config.report != "off":
        _write_report(folder, plan, results, out)
    out.print(f"results {folder / 'seeds.json'}")
    return all(results[seed]["finished"] for seed in plan.seeds)


def _write_report(folder: Path, plan: SeedsPlan, results: Results, out: Console) -> None:
    runs = [folder / f"seed{seed}" for seed in plan.seeds if results[seed]["finished"]]
    if runs:
        first = f" (the first {MAX_RUNS} seeds)" if len(runs) > MAX_RUNS else ""
        out.print(f"report {write_report(runs[:MAX_RUNS], folder / 'report.html')}{first}")


def _slots(config: Config, unit: str) -> list[dict[str, str]]:
    """Return the environment variables of the processes that run at a time: one for each GPU, or by CPU cores."""
    if unit == GPU:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        return [{"CUDA_VISIBLE_DEVICES": device} for device in devices]
    cores = len(psutil.Process().cpu_affinity() or ()) if sys.platform == "linux" else os.cpu_count() or 1
    each = (config.threads or cores) + config.trainer.num_workers
    return [{}] * max(1, cores // each)


def _run_all(
    waiting: Sequence[SeedRun],
    slots: Sequence[Mapping[str, str]],
    arguments: Sequence[str],
    options: Sequence[str],
    unit: str,
    show: Callable[[], None],
) -> Iterator[tuple[SeedRun, int, float]]:
    """Run all, as many at a time as there are slots; yield each as it ends, with exit code and cost."""
    queue, busy = list(waiting), dict[int, SeedRun]()
    while queue or busy:
        for index, slot in enumerate(slots):
            if queue and index not in busy:
                busy[index] = queue.pop(0)
                _start(busy[index], [*arguments], [*options], slot)
        show()
        time.sleep(POLL_S)
        for index, run in list(busy.items()):
            before = _child_seconds()
            # Waiting for a process adds its time to that of all children.
            code = None if run.process is None else run.process.poll()
            if code is not None:
                del busy[index]
                spent = _child_seconds() - before if unit == CPU else time.monotonic() - run.started
                yield run, code, run.earlier_cost + spent


def _start(run: SeedRun, arguments: list[str], options: list[str], environment: Mapping[str, str]) -> None:
    if RunDir(run.folder).numbered():
        command = ["--resume", str(run.folder), *options]
    else:
        # What is there was interrupted before it trained.
        shutil.rmtree(run.folder, ignore_errors=True)
        names = [f"seed={run.seed}", f"run={run.folder.name}", f"runs_dir={run.folder.parent}"]
        command = [*arguments, *names, *options]
    run.started = time.monotonic()
    with run.log.open("ab") as file:
        # A session of its own: Ctrl-C reaches the parent alone, which passes it on.
        run.process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "train", *command],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            start_new_session=True,
        )


def _child_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _cost_of(run: SeedRun, unit: str) -> float:
    """Return the cost so far of a process that runs; 0 if it has just ended."""
    if unit == GPU or run.process is None:
        return time.monotonic() - run.started
    try:
        times = psutil.Process(run.process.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return times.user + times.system


@contextmanager
def _display(runs: Sequence[SeedRun], results: Results, config: Config, out: Console) -> Iterator[Callable[[], None]]:
    """Show one line for each seed: in place on a terminal, else now and then."""

    def lines() -> list[str]:
        return [_line(run, results, config) for run in runs]

    if out.is_terminal:
        with Live(console=out, auto_refresh=False, transient=True) as live:
            yield lambda: live.update(Text("\n".join(lines())), refresh=True)
        return
    printed = dict[str, float]()

    def show() -> None:
        now = time.monotonic()
        for run, line in zip(runs, lines(), strict=True):
            key = f"{run.seed} {'over' if run.seed in results else 'running'}"
            if run.process is not None and now > printed.get(key, 0.0):
                printed[key] = now + LINE_S if run.seed not in results else float("inf")
                out.print(line)

    yield show
    show()


def _line(run: SeedRun, results: Results, config: Config) -> str:
    result = results.get(run.seed, {})
    if result.get("finished"):
        value = result["return"]
        return f"seed {run.seed} · finished" + ("" if value is None else f" · return {value:.3f}")
    if run.process is None:
        return f"seed {run.seed} · waits"
    if result and run.process.poll() is not None:
        return f"seed {run.seed} · failed"
    metrics = _newest(run.folder / "metrics.jsonl")
    parts = [f"seed {run.seed} · iteration {metrics.get('iteration', 0):,} of {config.iterations:,}"]
    if "charts/episodic_return" in metrics:
        parts.append(f"return {metrics['charts/episodic_return']:.3f}")
    return " · ".join(parts)


def _newest(file: Path) -> dict[str, Any]:
    """Return the last complete line of a metrics file."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
            lines = opened.read().splitlines(keepends=True)
        complete = [line for line in lines if line.endswith(b"\n")]
        return json.loads(complete[-1]) if complete else {}
    except (OSError, ValueError):
        # It has not started, or is being resumed.
        return {}
