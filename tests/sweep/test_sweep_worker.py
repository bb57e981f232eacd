"""A worker of a sweep, with a training that is scripted: scores, pruning, interruptions and deaths."""

import signal
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.sweep import worker
from holdfast.sweep.settings import new_settings
from holdfast.sweep.trials import GRID, TrialStore
from holdfast.training.callbacks import TrainingIteration
from holdfast.training.run_result import RunResult

ITERATIONS = 4


class Iteration(TrainingIteration):
    """An iteration of a scripted training."""

    def __init__(self, metrics, stop):
        self._metrics, self.stop = metrics, stop


def run_result(**fields):
    result = object.__new__(RunResult)
    result.__dict__.update(fields)
    return result


class Training:
    """Stands for `train`: returns by trial and seed, and what happens instead in some calls."""

    def __init__(self, config):
        self.names, self.scores, self.events, self.steps = [], {}, {}, config.steps

    def __call__(self, *, config, callbacks, **_):
        self.names.append(config.run)
        event = self.events.pop(config.run, None)
        if isinstance(event, Exception):
            raise event
        score, stops = self.scores.get(config.run, 1.0), []
        returns = {} if score is None else {"charts/episodic_return": score}
        for number in range(1, ITERATIONS + 1):
            metrics = {**returns, "global_step": self.steps * number // ITERATIONS}
            if event is not None and number == ITERATIONS // 2:
                event()
            callbacks[0](Iteration(metrics, lambda: stops.append(True)))
            if stops:
                break
        summary = {} if score is None else {"eval/return_mean": score}
        return run_result(finished=not stops, summary=summary, folder=Path(config.run))


@pytest.fixture
def sweep(tmp_path, monkeypatch):
    """Create a sweep, and return its study, its scripted training, and a function that works on it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def create(**options):
        options = {"trials": 3, **options}
        settings = new_settings("recall", {"seed": "5"}, ("trainer.optimizer.learning_rate=1e-4..1e-2",), **options)
        url = f"sqlite:///{tmp_path / 'study.db'}"
        store, training = TrialStore(url, "x"), Training(settings.config)
        store.create(settings)
        store.open()
        monkeypatch.setattr(worker, "train", training)
        monkeypatch.setattr(worker, "WAIT_S", 0)
        return store, training, lambda: worker.work(tmp_path, "x", url, None)

    yield create
    for number, handler in handlers.items():
        signal.signal(number, handler)


def states(store):
    return [trial.state.name for trial in store.all()]


def test_the_score_of_a_trial_is_the_interquartile_mean_of_its_seeds(sweep):
    store, training, work = sweep(trials=1, seeds=4)
    training.scores = {f"trial-000-seed-{seed}": score for seed, score in zip(range(5, 9), (0, 1, 2, 100), strict=True)}
    work()
    (trial,) = store.all()
    assert trial.values == [1.5]
    assert trial.user_attrs["runs"]["trial-000-seed-8"] == {"return": 100, "seed": 8}
    assert trial.user_attrs["cost"] > 0
    assert sorted(trial.intermediate_values) == list(range(1, 4 * GRID + 1))


def test_an_interrupted_trial_waits_and_its_finished_seeds_are_not_trained_again(sweep):
    store, training, work = sweep(trials=2, seeds=2)
    training.events = {"trial-000-seed-6": lambda: signal.raise_signal(signal.SIGINT)}
    work()
    assert states(store) == ["WAITING", "WAITING"]
    work()
    assert states(store) == ["COMPLETE", "COMPLETE"]
    assert training.names.count("trial-000-seed-5") == 1
    assert training.names.count("trial-000-seed-6") == 2


def test_a_worker_whose_parent_is_gone_stops(sweep, monkeypatch):
    store, training, work = sweep()
    training.events = {"trial-001-seed-5": lambda: monkeypatch.setattr(worker.os, "getppid", lambda: -1)}
    work()
    assert states(store) == ["COMPLETE", "WAITING", "WAITING"]


def test_a_trial_that_raises_is_tried_again_once_and_the_others_go_on(sweep):
    store, training, work = sweep()
    training.events = {"trial-000-seed-5": ValueError("no luck"), "trial-001-seed-5": ValueError("x")}
    work()
    assert states(store) == ["FAIL", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"]
    assert store.all()[0].user_attrs["error"].startswith("ValueError: no luck (test_sweep_worker.py:")
    assert [trial.user_attrs["index"] for trial in store.all()] == [0, 1, 2, 0, 1]


def test_a_config_that_is_refused_is_not_tried_again(sweep):
    store, training, work = sweep()
    training.events = {"trial-000-seed-5": ConfigError("no such policy")}
    work()
    assert states(store) == ["FAIL", "COMPLETE", "COMPLETE"]


def test_a_trial_without_return_fails(sweep):
    store, training, work = sweep(trials=1)
    training.scores = {"trial-000-seed-5": None}
    work()
    assert states(store) == ["FAIL"], "another attempt would not change it"
    assert "no episode ended in training" in store.all()[0].user_attrs["error"]


@pytest.mark.parametrize(
    ("options", "state"),
    [({}, "PRUNED"), ({"pruner": "none"}, "COMPLETE"), ({"objectives": "return,cost"}, "COMPLETE")],
)
def test_a_trial_below_the_median_curve_is_pruned(sweep, options, state):
    store, training, work = sweep(trials=5, **options)
    training.scores = {"trial-004-seed-5": 0.1}
    work()
    assert states(store) == ["COMPLETE"] * 4 + [state]
    assert (len(store.all()[-1].intermediate_values) == GRID) == (state == "COMPLETE" and not options.get("objectives"))
