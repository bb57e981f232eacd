"""Run a sweep: start its workers, replace those that die, print what they finish, and write the results."""

import fcntl
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.build import build_policy, build_training_world, select_device
from holdfast.config.run import override
from holdfast.errors import ConfigError, ContractError
from holdfast.sweep.page import write_page
from holdfast.sweep.processes import exit_reason, last_line, stop_all, terminating_cleanly
from holdfast.sweep.results import TrialResult, best_of, pareto_front, results_of, write_best
from holdfast.sweep.settings import SWEEP, SweepSettings, write_settings
from holdfast.sweep.trials import GRID, TrialStore, shown_url, worker_name
from holdfast.sweep.worker import STORAGE
from holdfast.trust import current_source
from holdfast.worlds import closing_world

POLL_S, SILENT_CHECK_S, PROGRESS_S, PAGE_S = 0.5, 30.0, 30.0, 120.0
MOST_DEATHS = 3
"""Workers in a row that end before they take a trial."""
WORKER = "holdfast.cli.sweep_worker"
DATABASE = "study.db"
Log = Callable[[str], object]


@dataclass(frozen=True)
class SweepPlace:
    """Where a sweep lives."""

    folder: Path
    study: str
    storage: str | None = None
    """A URL; None: SQLite in the folder."""

    @property
    def url(self) -> str:
        """The URL of the storage."""
        return self.storage or f"sqlite:///{self.folder / DATABASE}"


@dataclass
class SweepWorker:
    """A worker process."""

    process: subprocess.Popen[bytes]
    name: str
    """As in the study."""
    log: Path


@dataclass
class Sweep:
    """A sweep that runs on this machine."""

    place: SweepPlace
    settings: SweepSettings
    store: TrialStore
    count: int
    """Workers."""
    log: Log
    workers: dict[int, SweepWorker] = field(default_factory=dict)
    states: dict[int, tuple[str, int]] = field(default_factory=dict)
    """State and attempt of each trial that was printed."""
    deaths: int = 0
    again: set[int] = field(default_factory=set)
    """Trials whose first death was printed."""

    def results(self) -> list[TrialResult]:
        """Return what is in the study now."""
        return results_of(self.store.all(), GRID * self.settings.seeds)


def run_sweep(place: SweepPlace, settings: SweepSettings, *, workers: int, log: Log = print) -> list[TrialResult]:
    """Run a sweep until all its trials are finished, and return them; KeyboardInterrupt: it was stopped, saved."""
    exists = (place.folder / SWEEP).exists()
    if not exists:
        _check_policies(settings)
    _make_folder(place.folder)
    with _locked(place.folder):
        store = TrialStore(place.url, place.study)
        store.create(settings, exists=exists)
        settings = store.open()
        write_settings(place.folder, settings, place.study, shown_url(place.storage) if place.storage else "")
        sweep = Sweep(place, settings, store, workers, log)
        for trial in store.recover():
            log(f"trial {trial.user_attrs['index']} was interrupted; it continues.")
        _print_head(sweep)
        try:
            with terminating_cleanly():
                _watch(sweep)
        finally:
            stop_all([worker.process for worker in sweep.workers.values()], log)
            store.recover()
            _print_news(sweep)
            _write_results(sweep)
    return sweep.results()


def _check_policies(settings: SweepSettings) -> None:
    """Build the policy of each choice: names of policies and cells are no part of the config."""
    dimensions = [each for each in settings.dimensions if each.key.startswith("policy.") and each.choices]
    if not dimensions:
        return
    config = override(settings.config, {"trainer.num_workers": 0})
    device = select_device(config)
    with closing_world(build_training_world(config, device, config.seed), config.world) as world:
        for dimension in dimensions:
            for choice in dimension.choices:
                try:
                    build_policy(override(config, {dimension.key: choice}), world, device)
                except ConfigError as error:
                    raise ConfigError(f"--space {dimension}: {error}") from error


def _print_head(sweep: Sweep) -> None:
    results = sweep.results()
    _remember_finished(sweep, results)
    done, settings = sum(result.state in ("finished", "pruned") for result in results), sweep.settings
    seeds = f" of {settings.seeds} seeds" if settings.seeds > 1 else ""
    finished = f", {done} of them finished" if done else ""
    sweep.log(
        f"sweep {sweep.place.folder} · recipe {settings.recipe} · {len(results)} trials{seeds}{finished} · "
        f"{sweep.count} worker{'s' * (sweep.count > 1)}"
    )
    for dimension in settings.dimensions:
        sweep.log(f"  {dimension.key} in {dimension.text}")


def _remember_finished(sweep: Sweep, results: list[TrialResult]) -> None:
    for result in results:
        if result.state in ("finished", "pruned", "failed"):
            sweep.states[result.index] = (result.state, result.attempts)
            sweep.again.add(result.index)


def _watch(sweep: Sweep) -> None:
    """Start workers and replace those that die, until no trial is left."""
    silent_check = progress = page = time.monotonic()
    while True:
        _reap(sweep)
        now = time.monotonic()
        if now > silent_check + SILENT_CHECK_S:
            silent_check = now
            sweep.store.fail_silent()
        pending = sweep.store.pending()
        news = _print_news(sweep)
        if news:
            progress = now
            if now > page + PAGE_S:
                page = now
                _write_results(sweep)
        elif now > progress + PROGRESS_S:
            progress = now
            _print_progress(sweep)
        if not pending and not sweep.workers:
            return
        # One worker may end while a trial of another one dies.
        waiting = sum(trial.state.name == "WAITING" for trial in pending)
        for index in range(sweep.count):
            if waiting > 0 and index not in sweep.workers:
                sweep.workers[index] = _start_worker(sweep, index)
                waiting -= 1
        time.sleep(POLL_S)


def _start_worker(sweep: Sweep, index: int) -> SweepWorker:
    log = sweep.place.folder / f"worker-{socket.gethostname()}-{index}.log"
    # What the user typed is trusted, also in the configs of trials that were interrupted.
    source = current_source()
    trusted = "trusted" if source.trust_code or source.origin is None else "installed"
    command = [sys.executable, "-m", WORKER, str(sweep.place.folder), sweep.place.study, str(index)]
    environment = {**os.environ, STORAGE: sweep.place.url, "OMP_NUM_THREADS": "1"}
    with log.open("ab") as file:
        # A session of its own: Ctrl-C reaches the parent alone, which passes it on.
        process = subprocess.Popen(
            [*command, trusted],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return SweepWorker(process, worker_name(process.pid), log)


def _reap(sweep: Sweep) -> None:
    """Take ended workers off the list; the trial of one that died is failed, and tried again once."""
    for index, worker in list(sweep.workers.items()):
        code = worker.process.poll()
        if code is None:
            continue
        del sweep.workers[index]
        if code == 0:
            sweep.deaths = 0
            continue
        reason = f"worker {index} (process {worker.process.pid}) {exit_reason(code)}"
        trial = sweep.store.of_worker(worker.name)
        if trial is not None:
            sweep.deaths = 0
            sweep.again.add(trial.user_attrs["index"])
            again = sweep.store.fail(trial, reason)
            action = "it is tried again" if again else "it failed twice and is left out"
            sweep.log(f"trial {trial.user_attrs['index']}: {reason}; {action}. Its output is in {worker.log}.")
            continue
        sweep.deaths += 1
        sweep.log(f"{reason} between trials; another one starts.")
        if sweep.deaths >= MOST_DEATHS:
            raise ContractError(
                f"{sweep.deaths} workers ended before they took a trial: {last_line(worker.log)} ({worker.log}). "
                f"Then continue with: holdfast sweep --resume {shlex.quote(str(sweep.place.folder))}"
            )


def _print_news(sweep: Sweep) -> bool:
    """Print the trials that were finished since the last call; return whether there are any."""
    results, news = sweep.results(), False
    best = best_of(results)
    for result in results:
        state = (result.state, result.attempts)
        if result.attempts > 1 and result.index not in sweep.again:
            sweep.again.add(result.index)
            sweep.log(f"trial {result.index}: {result.error}; it is tried again.")
        if sweep.states.get(result.index) == state or result.state in ("waiting", "running"):
            continue
        sweep.states[result.index], news = state, True
        cost = "" if result.cost is None else f" · {result.cost:.1f} s"
        if result.state == "finished":
            mark = " · best so far" if best is not None and best.index == result.index else ""
            text = f"return {result.score:.3f}{cost} · {result.describe()}{mark}"
        elif result.state == "pruned":
            text = f"pruned{cost} · {result.describe()}"
        else:
            text = f"failed: {result.error} · {result.describe()}"
        sweep.log(f"trial {result.index}: {text}")
    return news


def _print_progress(sweep: Sweep) -> None:
    results = sweep.results()
    done = sum(result.state in ("finished", "pruned", "failed") for result in results)
    running = [f"trial {result.index} at {result.progress:.0%}" for result in results if result.state == "running"]
    sweep.log(f"{done} of {len(results)} trials are over; {', '.join(running) or 'none'} running")


def _write_results(sweep: Sweep) -> None:
    """Write best.yaml and sweep.html, as far as there are results."""
    results = sweep.results()
    best = best_of(results)
    if best is not None:
        write_best(sweep.place.folder, sweep.settings, best)
    write_page(sweep.place.folder, sweep.settings, results, sweep.store.importances())


def summary(place: SweepPlace, results: list[TrialResult]) -> Iterator[str]:
    """Yield the lines that end a sweep: the best trial, the front, and the files."""
    best = best_of(results)
    for result in results:
        if result.state == "failed":
            yield f"trial {result.index} failed: {result.error}"
    if best is None:
        yield "no trial finished, so there is no best one."
        return
    yield f"best is trial {best.index}: return {best.score:.3f} · {best.describe()}"
    front = [f"{result.score:.3f} for {result.cost:.1f} s (trial {result.index})" for result in pareto_front(results)]
    yield f"Pareto front of return and cost: {', '.join(front)}"
    yield f"train it with: holdfast train {shlex.quote(str(place.folder / 'best.yaml'))}"
    yield f"page {place.folder / 'sweep.html'}"


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write the sweep's folder {folder}: {error.strerror}; set runs_dir=DIR.") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process of this machine run the sweep; others share the folder, if at all, from other machines."""
    with (folder / f".lock-{socket.gethostname()}").open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder} is being swept by another process; stop that one first.") from None
        yield
