"""A worker of a sweep: a process that takes trials from the study and trains them, until none is left."""

import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from holdfast.checkpoint.run_dir import RunDir
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError, located_error_text, one_line
from holdfast.evaluation.score import interquartile_mean
from holdfast.sweep.settings import SweepSettings
from holdfast.sweep.trials import COST, GRID, INDEX, RUNS, SCORE, Trial, TrialStore, worker_name
from holdfast.training.callbacks import TrainingIteration
from holdfast.training.run_result import RunResult
from holdfast.training.train import train
from holdfast.trust import NameSource, names_from

STORAGE = "HOLDFAST_SWEEP_STORAGE"
"""Environment variable with the URL, which may hold a password: arguments are public."""
WAIT_S = 1.0
"""Until waiting trials are looked for again."""


class StopSignals:
    """Whether this process must stop: it got a signal, or the process that started it is gone."""

    def __init__(self) -> None:
        self._requested, self._parent = False, os.getppid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: object) -> None:
        self._requested = True

    def __bool__(self) -> bool:
        return self._requested or os.getppid() != self._parent


class LearningCurve:
    """Reports the returns of one run of a trial, as a callback of it, and stops it if it is pruned or interrupted."""

    def __init__(
        self, trial: Trial, config: Config, *, first_step: int, cost: float, prunes: bool, stop: StopSignals
    ) -> None:
        self._trial, self._steps, self._first, self._prunes, self._stop = trial, config.steps, first_step, prunes, stop
        self._cost, self._clock = cost, Clock(config)
        self._returns, self._point = list[float](), 0
        reported = trial.study.get_trials(deepcopy=False)[trial.number].intermediate_values
        self._reported = set(reported)
        self.pruned = False
        self.cost = cost
        """Cost of the trial so far, with this run."""

    def __call__(self, iteration: TrainingIteration) -> None:
        """Read one iteration."""
        self.cost = self._cost + self._clock.seconds()
        if "charts/episodic_return" in iteration.metrics:
            self._returns.append(float(iteration.metrics["charts/episodic_return"]))
        point = min(GRID, int(GRID * iteration.metrics["global_step"] / self._steps))
        if point > self._point and self._returns:
            self._report(point)
            self.pruned = self._prunes and self._trial.should_prune()
        if self.pruned or self._stop:
            iteration.stop()

    def _report(self, point: int) -> None:
        """Report the mean return since the last point, at every point since then."""
        self._trial.set_user_attr(COST, self.cost)
        for step in range(self._first + self._point + 1, self._first + point + 1):
            if self._prunes and step not in self._reported:
                self._trial.report(sum(self._returns) / len(self._returns), step)
        self._returns, self._point = [], point


class Clock:
    """CPU-seconds of this process and its children since it was made; on a GPU, seconds."""

    def __init__(self, config: Config) -> None:
        self._on_gpu = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
        self._start = self._now()

    def _now(self) -> float:
        if self._on_gpu:
            return time.perf_counter()
        used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(usage.ru_utime + usage.ru_stime for usage in used)

    def seconds(self) -> float:
        """Return the seconds so far."""
        return self._now() - self._start


def work(folder: Path, study: str, url: str, trust_code: bool | None) -> None:
    """Take trials until all are finished."""
    stop, store, worker = StopSignals(), TrialStore(url, study), worker_name(os.getpid())
    with names_from(NameSource(str(folder), trust_code)):
        _take_trials(store, worker, folder, stop, trust_code)


def _take_trials(store: TrialStore, worker: str, folder: Path, stop: StopSignals, trust_code: bool | None) -> None:
    settings = store.open()
    while not stop:
        trial = store.claim(worker)
        if trial is None:
            if not store.pending():
                return
            # One that runs elsewhere may die.
            time.sleep(WAIT_S)
            continue
        with store.signs_of_life(trial):
            _run_trial(store, trial, settings, folder, stop, trust_code)


def _run_trial(
    store: TrialStore, trial: Trial, settings: SweepSettings, folder: Path, stop: StopSignals, trust_code: bool | None
) -> None:
    try:
        values = {dimension.key: dimension.suggest(trial) for dimension in settings.dimensions}
        config = override(settings.config, values)
        print(f"trial {trial.user_attrs[INDEX]}: {values}", flush=True)
        scores = _train_seeds(trial, settings, config, folder, stop, trust_code)
    except ConfigError as error:
        store.fail(trial, one_line(error), retry=False)
    except Exception as error:
        print(located_error_text(error), flush=True)
        store.fail(trial, located_error_text(error))
    else:
        if scores is None and stop:
            store.release(trial)
        else:
            store.finish(trial, scores)


def _train_seeds(
    trial: Trial, settings: SweepSettings, base: Config, folder: Path, stop: StopSignals, trust_code: bool | None
) -> dict[str, float] | None:
    """Train the seeds of a trial, those that are not finished; return score and cost, None: pruned or interrupted."""
    runs = dict(trial.user_attrs.get(RUNS, {}))
    cost = float(trial.user_attrs.get(COST, 0.0))
    for number in range(settings.seeds):
        name = f"trial-{trial.user_attrs[INDEX]:03}-seed-{base.seed + number}"
        if name in runs:
            continue
        if stop:
            return None
        keys = {"run": name, "runs_dir": str(folder), "seed": base.seed + number}
        config = override(base, keys)
        # Without a second objective only: Optuna prunes no trial with two.
        prunes = settings.objectives == "return"
        curve = LearningCurve(trial, settings.config, first_step=number * GRID, cost=cost, prunes=prunes, stop=stop)
        run = _train(config, folder / name, curve, trust_code)
        cost = curve.cost
        trial.set_user_attr(COST, cost)
        if not run.finished:
            if not curve.pruned:
                # A signal that came while the run handled them.
                signal.raise_signal(signal.SIGTERM)
            return None
        runs[name] = {"return": _return_of(run), "seed": config.seed}
        trial.set_user_attr(RUNS, runs)
    returns = [run["return"] for run in runs.values()]
    return {SCORE: interquartile_mean(returns), COST: cost}


def _train(config: Config, folder: Path, curve: LearningCurve, trust_code: bool | None) -> RunResult:
    """Train a run, or resume the one that was interrupted."""
    command = f"a trial of the sweep {folder.parent}"
    if RunDir(folder).numbered():
        return train(resume=folder, callbacks=[curve], quiet=True, trust_code=trust_code, command=command)
    if folder.exists():
        # It has not trained.
        shutil.rmtree(folder)
    return train(config=config, callbacks=[curve], quiet=True, trust_code=trust_code, command=command)


def _return_of(run: RunResult) -> float:
    score = run.summary.get("eval/return_mean")
    if score is None:
        # Another attempt would not change it.
        raise ConfigError("no episode ended in training, so there is no return; give more trainer.total_timesteps.")
    return float(score)


def main() -> None:
    """Work on the sweep that the arguments name: folder, study, index of the worker, and whether code is trusted."""
    folder, study, index, trusted = sys.argv[1:]
    if torch.cuda.device_count() > 1:
        torch.cuda.set_device(int(index) % torch.cuda.device_count())
    work(Path(folder), study, os.environ[STORAGE], True if trusted == "trusted" else None)
