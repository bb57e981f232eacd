"""The trials of a sweep in an Optuna study: claimed by one worker each, released, failed and tried again once.

All trials are in the study from the start, as waiting ones, so workers on any machine take them until none is left.
"""

import math
import re
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import psutil

from holdfast.errors import ConfigError, HoldfastError, error_text, one_line
from holdfast.install import install_command
from holdfast.sweep.settings import MOST, OBJECTIVES, SweepSettings

try:
    import optuna
    from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, UpdateFinishedTrialError
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial, Trial, TrialState, create_trial
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError
except ImportError as error:
    raise ConfigError(
        f"holdfast sweep needs the package optuna, which is missing; {install_command('sweep')}."
    ) from error

CLAIM_S = 0.2
"""Until a worker looks whether another one has claimed the same trial."""
HEARTBEAT_S, SILENT_S = 20, 180
"""Seconds between signs of life of a running trial, and until one without them counts as dead."""
SQLITE_TIMEOUT_S = 120
"""Other workers write to the same file."""
CREATED_WITHIN_S = 15
"""Another process may be adding the trials."""
GRID = 20
"""Points of a run's learning curve at which trials are compared."""
STARTUP_TRIALS, COMPARED_TRIALS = 10, 4
"""Trials drawn at random before the sampler learns from them (at most a third); trials before any is pruned."""
SETTINGS, READY = "settings", "ready"
"""Attributes of the study."""
INDEX, ATTEMPT, RETRY_OF, WORKER, ERROR, FINAL = "index", "attempt", "retry_of", "worker", "error", "final"
RUNS, COST, SCORE = "runs", "cost", "score"
"""Attributes of trials."""
PENDING = (TrialState.WAITING, TrialState.RUNNING)


def worker_name(pid: int) -> str:
    """Return the name of a worker of this machine."""
    return f"{socket.gethostname()}:{pid}"


def _is_gone(worker: str) -> bool:
    """Return whether a worker of this machine has ended; of other machines it is unknown."""
    host, _, pid = worker.rpartition(":")
    return host == socket.gethostname() and not psutil.pid_exists(int(pid))


class TrialStore:
    """The study of a sweep."""

    def __init__(self, url: str, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._storage = _open_storage(url)
        self._name = name
        self._study: optuna.Study | None = None

    def create(self, settings: SweepSettings, *, exists: bool = False) -> None:
        """Create the study with all its trials, or join the one that is there, with more trials if it has fewer.

        With `exists` it was created before, and is not created again where it is lost.
        """
        directions = OBJECTIVES[settings.objectives]
        try:
            if exists:
                raise DuplicatedStudyError
            study = optuna.create_study(storage=self._storage, study_name=self._name, directions=directions)
            study.set_user_attr(SETTINGS, settings.to_json())
        except DuplicatedStudyError:
            study = self._created_study()
        saved = _settings_of(study)
        difference = saved.difference(settings)
        if difference:
            raise ConfigError(
                f"The sweep {self._name} was started otherwise: {difference}. Name this one run=NAME, or continue the "
                "other with --resume FOLDER."
            )
        present = 1 + max((trial.user_attrs[INDEX] for trial in _attempts(study)), default=-1)
        _add_trials(study, range(present, settings.trials), saved)
        if settings.trials > saved.trials:
            study.set_user_attr(SETTINGS, settings.to_json())
        study.set_user_attr(READY, True)

    def _created_study(self) -> optuna.Study:
        """Load a study; while another process creates it, wait, unless that one was interrupted."""
        end = time.monotonic() + CREATED_WITHIN_S
        while True:
            study = self._load_study()
            if READY in study.user_attrs or time.monotonic() > end:
                return study
            time.sleep(0.5)

    def _load_study(self) -> optuna.Study:
        with _reading(self._name):
            return optuna.load_study(storage=self._storage, study_name=self._name)

    def open(self) -> SweepSettings:
        """Open the study, with its sampler and pruner; return its settings."""
        study = self._load_study()
        settings = _settings_of(study)
        study.pruner = optuna.pruners.NopPruner()
        if settings.pruner == "median":
            study.pruner = optuna.pruners.MedianPruner(n_startup_trials=COMPARED_TRIALS, n_warmup_steps=GRID // 4)
        self._startup, self._seed = max(1, min(STARTUP_TRIALS, settings.trials // 3)), settings.config.seed
        self._study = study
        return settings

    @property
    def study(self) -> optuna.Study:
        """The open study."""
        if self._study is None:
            raise ConfigError(f"The study {self._name} is not open.")
        return self._study

    def all(self) -> list[FrozenTrial]:
        """Return all attempts at trials, in order."""
        return _attempts(self.study)

    def pending(self) -> list[FrozenTrial]:
        """Return the attempts that wait or run."""
        return [trial for trial in self.all() if trial.state in PENDING]

    def claim(self, worker: str) -> Trial | None:
        """Take the next waiting trial; None: none waits now."""
        for frozen in self.all():
            if frozen.state != TrialState.WAITING or not self._set_state(frozen, TrialState.RUNNING):
                continue
            number = self._storage.get_trial_id_from_study_id_trial_number(self._study_id, frozen.number)
            self._storage.set_trial_user_attr(number, WORKER, worker)
            # SQLite does not lock what it reads: of two workers that claim a trial at once, the later one has it.
            time.sleep(CLAIM_S)
            if self._storage.get_trial(number).user_attrs.get(WORKER) != worker:
                continue
            seed = np.random.SeedSequence([self._seed, frozen.number]).generate_state(1)[0]
            # Drawn for this trial alone, so that a resumed sweep with one worker draws the same values.
            self.study.sampler = optuna.samplers.TPESampler(
                seed=int(seed), n_startup_trials=self._startup, constant_liar=len(self.study.directions) == 1
            )
            return Trial(self.study, number)
        return None

    @contextmanager
    def signs_of_life(self, trial: Trial) -> Iterator[None]:
        """Record that a trial is running, until the block ends."""
        number = self._id_of(trial)
        ended = threading.Event()

        def record() -> None:
            while not ended.is_set():
                try:
                    self._storage.record_heartbeat(number)
                except SQLAlchemyError as error:
                    print(f"the storage did not answer: {one_line(error, 200)}", flush=True)
                ended.wait(HEARTBEAT_S)

        thread = threading.Thread(target=record, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(SQLITE_TIMEOUT_S)

    def release(self, trial: Trial | FrozenTrial) -> None:
        """Let an interrupted trial wait again; its values and its finished runs stay."""
        self._set_state(trial, TrialState.WAITING)

    def finish(self, trial: Trial, values: Mapping[str, float] | None) -> None:
        """Record the return and the cost of a trial; None: it was pruned."""
        if values is None:
            self.study.tell(trial, state=TrialState.PRUNED)
            return
        for name, value in values.items():
            trial.set_user_attr(name, value)
        self.study.tell(trial, [values[SCORE], values[COST]][: len(self.study.directions)])

    def fail(self, trial: Trial | FrozenTrial, reason: str, *, retry: bool = True) -> bool:
        """Record that a trial died, and let it be tried again if this was the first time; return whether it is."""
        number = self._id_of(trial)
        try:
            self._storage.set_trial_user_attr(number, ERROR, reason)
            if not retry:
                self._storage.set_trial_user_attr(number, FINAL, True)
        except UpdateFinishedTrialError:
            return False
        # Of several processes that notice the death, one succeeds.
        return self._set_state(trial, TrialState.FAIL) and _retry(self.study, self._storage.get_trial(number))

    def fail_silent(self) -> None:
        """Fail running trials without signs of life, such as those of a machine that is gone."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self.study)

    def recover(self) -> list[FrozenTrial]:
        """Release trials of workers of this machine that have ended, and add retries that are missing; return them."""
        attempts = self.all()
        orphans = [
            trial
            for trial in attempts
            if trial.state == TrialState.RUNNING and _is_gone(trial.user_attrs.get(WORKER, ""))
        ]
        for trial in orphans:
            self.release(trial)
        retried = {trial.user_attrs.get(RETRY_OF) for trial in attempts}
        for trial in attempts:
            if trial.state == TrialState.FAIL and trial.number not in retried:
                _retry(self.study, trial)
        return orphans

    def of_worker(self, worker: str) -> FrozenTrial | None:
        """Return the trial that a worker runs."""
        running = (trial for trial in self.all() if trial.state == TrialState.RUNNING)
        return next((trial for trial in running if trial.user_attrs.get(WORKER) == worker), None)

    def importances(self) -> dict[str, float]:
        """Return how much of the differences of return each key explains; empty: too few trials are finished."""
        # A damaged study may have lost the values of a trial.
        finished = [trial for trial in self.all() if trial.state == TrialState.COMPLETE and trial.values]
        if len(finished) < COMPARED_TRIALS or len({trial.values[0] for trial in finished}) == 1:
            return {}
        with warnings.catch_warnings():
            # It warns that a target must be low to be good: it is.
            warnings.simplefilter("ignore", UserWarning)
            try:
                return optuna.importance.get_param_importances(self.study, target=_negative_return)
            except (TypeError, ValueError):
                return {}

    @property
    def _study_id(self) -> int:
        return self._storage.get_study_id_from_name(self._name)

    def _id_of(self, trial: Trial | FrozenTrial) -> int:
        return self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number)

    def _set_state(self, trial: Trial | FrozenTrial, state: TrialState) -> bool:
        try:
            return self._storage.set_trial_state_values(self._id_of(trial), state)
        except UpdateFinishedTrialError:
            return False


def _attempts(study: optuna.Study) -> list[FrozenTrial]:
    with _reading(study.study_name):
        attempts = [trial for trial in study.get_trials(deepcopy=False) if INDEX in trial.user_attrs]
        for trial in attempts:
            _require_attributes(trial)
    return attempts


def _require_attributes(trial: FrozenTrial) -> None:
    """Raise a ValueError for attributes that no sweep writes."""
    attributes = trial.user_attrs
    finished = trial.state == TrialState.COMPLETE
    right = {
        INDEX: type(attributes[INDEX]) is int and 0 <= attributes[INDEX] < MOST,
        ATTEMPT: attributes.get(ATTEMPT) in (1, 2),
        SCORE: _is_number(attributes.get(SCORE, None if finished else 0.0)),
        COST: _is_number(attributes.get(COST, None if finished else 0.0)),
        RUNS: isinstance(attributes.get(RUNS, {}), dict)
        and all(isinstance(run, dict) and _is_number(run.get("return")) for run in attributes.get(RUNS, {}).values()),
        ERROR: isinstance(attributes.get(ERROR, ""), str),
        WORKER: re.fullmatch(r".*:\d{1,9}", str(attributes.get(WORKER, ":0"))) is not None,
    }
    for name, is_right in right.items():
        if not is_right:
            raise ValueError(f"{name} of trial {trial.number} is {str(attributes.get(name))[:100]!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def _reading(study: str) -> Iterator[None]:
    """Raise an error of one line, whatever Optuna raises for a damaged storage."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise ConfigError(
            f"The storage of the sweep {study} cannot be read: {error_text(error, 200)}. If it is damaged, start a new "
            "sweep; the best trial so far is in best.yaml."
        ) from error


def _negative_return(trial: FrozenTrial) -> float:
    """Return the target of PED-ANOVA, which explains what makes it low."""
    return -trial.values[0]


def _settings_of(study: optuna.Study) -> SweepSettings:
    with _reading(study.study_name):
        if SETTINGS not in study.user_attrs:
            raise ConfigError(f"The study {study.study_name} of this storage is no sweep; name this one: run=NAME.")
        return SweepSettings.from_json(study.user_attrs[SETTINGS])


def _add_trials(study: optuna.Study, indices: range, settings: SweepSettings) -> None:
    """Add waiting trials; the first has the values of the recipe, as far as they are in the space."""
    config = settings.config
    values = {dimension.key: dimension.value_in(config) for dimension in settings.dimensions}
    defaults = {key: value for key, value in values.items() if value is not None}
    for index in indices:
        study.enqueue_trial({} if index else defaults, user_attrs={INDEX: index, ATTEMPT: 1})


def _retry(study: optuna.Study, failed: FrozenTrial) -> bool:
    """Add a second attempt at a trial, with its values, its curve and its finished runs."""
    attributes = failed.user_attrs
    if attributes.get(ATTEMPT) != 1 or attributes.get(FINAL):
        return False
    copied = {name: value for name, value in attributes.items() if name not in (WORKER, ERROR)}
    study.add_trial(
        create_trial(
            state=TrialState.WAITING,
            params=failed.params,
            distributions=failed.distributions,
            user_attrs={**copied, ATTEMPT: 2, RETRY_OF: failed.number},
            intermediate_values=failed.intermediate_values,
        )
    )
    return True


def _retry_silent(study: optuna.Study, failed: FrozenTrial) -> None:
    _retry(study, failed)


def _open_storage(url: str) -> RDBStorage:
    engine = {"connect_args": {"timeout": SQLITE_TIMEOUT_S}} if url.startswith("sqlite") else None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            return RDBStorage(
                url,
                engine_kwargs=engine,
                heartbeat_interval=HEARTBEAT_S,
                grace_period=SILENT_S,
                heartbeat_stale_trial_callback=_retry_silent,
            )
    except (SQLAlchemyError, ImportError, ValueError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"--storage {shown_url(url)} cannot be opened: {one_line(error, 200)}. Write a URL of SQLAlchemy, such as "
            "sqlite:///study.db or postgresql://user:password@host/database."
        ) from None


def shown_url(url: str) -> str:
    """Return a URL with its password hidden."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url
