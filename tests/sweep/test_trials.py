"""The trials of a study: each is claimed once, released, failed and tried again once."""

import copy
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import datetime, timedelta

import optuna
import pytest
import sqlalchemy

from holdfast.errors import ConfigError
from holdfast.sweep import trials
from holdfast.sweep.settings import new_settings
from holdfast.sweep.trials import TrialState, TrialStore, shown_url, worker_name

RATE = "trainer.optimizer.learning_rate"
SPACE = (f"{RATE}=log:1e-4..1e-2", "policy.memory=lstm,gru")


def settings(**options):
    return new_settings("recall", {"world.agents": "64"}, SPACE, **{"trials": 4, **options})


@pytest.fixture
def url(tmp_path):
    return f"sqlite:///{tmp_path / 'study.db'}"


@pytest.fixture
def store(url):
    store = TrialStore(url, "x")
    store.create(settings())
    store.open()
    return store


def suggest(store, trial):
    return {dimension.key: dimension.suggest(trial) for dimension in settings().dimensions}


def states(store):
    return [trial.state.name for trial in store.all()]


def test_two_stores_share_the_trials_and_none_is_claimed_twice(store, url):
    other = TrialStore(url, "x")
    assert other.open() == settings()
    claimed = [each.claim("m:1") for each in (store, other, store, other)]
    assert [trial.user_attrs["index"] for trial in claimed] == [0, 1, 2, 3]
    assert store.claim("m:1") is other.claim("m:2") is None


def test_a_trial_that_another_worker_takes_meanwhile_is_not_claimed(store, url, monkeypatch):
    other, stale = TrialStore(url, "x"), copy.deepcopy(store.all())
    other.open()
    assert other.claim("m:2").number == 0
    monkeypatch.setattr(store, "all", lambda: stale)
    assert store.claim("m:1").number == 1


def test_the_first_trial_has_the_values_of_the_recipe_that_lie_in_the_space(store):
    first, second = store.claim("m:1"), store.claim("m:1")
    assert suggest(store, first)[RATE] == 1e-3
    assert suggest(store, second)[RATE] != 1e-3


def test_values_are_drawn_by_seed_and_trial(store, tmp_path):
    other = TrialStore(f"sqlite:///{tmp_path / 'other.db'}", "x")
    other.create(settings())
    other.open()
    drawn = [[suggest(each, each.claim("m:1")) for _ in range(3)] for each in (store, other)]
    assert drawn[0] == drawn[1]


def test_a_released_trial_keeps_its_values(store):
    trial = store.claim("m:1")
    values = suggest(store, trial)
    store.release(trial)
    again = store.claim("m:2")
    assert again.number == trial.number
    assert suggest(store, again) == values


def test_a_trial_that_dies_is_tried_again_once(store):
    trial = store.claim("m:1")
    values = suggest(store, trial)
    trial.report(0.5, 1)
    trial.set_user_attr("runs", {"a": {"return": 1.0}})
    assert store.fail(trial, "killed")
    assert not store.fail(trial, "killed"), "another process that notices it adds no second retry"
    for _ in range(3):
        store.claim("m:1")
    again = store.claim("m:1")
    assert again.user_attrs["index"] == 0
    assert suggest(store, again) == values
    assert store.all()[-1].intermediate_values == {1: 0.5}
    assert again.user_attrs["runs"] == {"a": {"return": 1.0}}
    assert not store.fail(again, "killed"), "once only"
    assert states(store) == ["FAIL", "RUNNING", "RUNNING", "RUNNING", "FAIL"]


def test_an_impossible_trial_is_not_tried_again(store):
    assert not store.fail(store.claim("m:1"), "no such policy", retry=False)
    assert store.recover() == []
    assert states(store) == ["FAIL", "WAITING", "WAITING", "WAITING"]


def test_a_retry_that_was_not_added_is_added_on_recovery(store, monkeypatch):
    monkeypatch.setattr(trials, "_retry", lambda study, failed: False)
    store.fail(store.claim("m:1"), "killed")
    monkeypatch.undo()
    store.recover()
    store.recover()
    assert states(store) == ["FAIL", "WAITING", "WAITING", "WAITING", "WAITING"]


def test_trials_of_ended_workers_of_this_machine_wait_again(store):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    store.claim(worker_name(ended.pid))
    store.claim("elsewhere:1")
    assert [trial.number for trial in store.recover()] == [0]
    assert states(store) == ["WAITING", "RUNNING", "WAITING", "WAITING"]


def test_a_trial_without_signs_of_life_is_tried_again(store, url):
    trial = store.claim("elsewhere:1")
    with store.signs_of_life(trial):
        store.fail_silent()
    assert states(store)[0] == "RUNNING"
    engine = sqlalchemy.create_engine(url)
    with engine.begin() as connection:
        past = datetime.now() - timedelta(days=2)
        connection.execute(sqlalchemy.text("update trial_heartbeats set heartbeat = :past"), {"past": past})
    engine.dispose()
    store.fail_silent()
    store.fail_silent()
    assert states(store) == ["FAIL", "WAITING", "WAITING", "WAITING", "WAITING"]


def test_more_trials_may_be_added_but_nothing_else_may_change(url, store):
    TrialStore(url, "x").create(settings(trials=6))
    TrialStore(url, "x").create(settings(trials=6))
    assert [trial.user_attrs["index"] for trial in store.all()] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="seeds 1 → 2"):
        TrialStore(url, "x").create(settings(seeds=2))


def test_a_sweep_whose_creation_was_interrupted_gets_its_trials(url, monkeypatch):
    monkeypatch.setattr(trials, "CREATED_WITHIN_S", 0)
    study = optuna.create_study(storage=url, study_name="x", direction="maximize")
    study.set_user_attr("settings", settings().to_json())
    study.enqueue_trial({}, user_attrs={"index": 0, "attempt": 1})
    TrialStore(url, "x").create(settings())
    store = TrialStore(url, "x")
    store.open()
    assert [trial.user_attrs["index"] for trial in store.all()] == [0, 1, 2, 3]


def test_with_two_objectives_return_and_cost_are_recorded(url):
    store = TrialStore(url, "x")
    store.create(settings(objectives="return,cost"))
    store.open()
    trial = store.claim("m:1")
    suggest(store, trial)
    store.finish(trial, {"score": 0.5, "cost": 3.0})
    assert store.all()[0].values == [0.5, 3.0]
    assert store.all()[0].state == TrialState.COMPLETE


def test_the_key_that_decides_high_returns_is_the_most_important(url):
    store = TrialStore(url, "x")
    store.create(settings(trials=12))
    store.open()
    assert store.importances() == {}
    for _ in range(12):
        trial = store.claim("m:1")
        values = suggest(store, trial)
        store.finish(trial, {"score": float(values[RATE] > 1e-3), "cost": 1.0})
    importances = store.importances()
    assert importances[RATE] > importances["policy.memory"]


@pytest.mark.parametrize("url", ["nonsense", "nosuch://host/x", "sqlite:////no/such/folder/x.db"])
def test_a_storage_that_cannot_be_opened_is_one_line(url):
    with pytest.raises(ConfigError) as refused:
        TrialStore(url, "x")
    assert url in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        'UPDATE trial_params SET distribution_json=\'{"name": "CategoricalDistribution", "attributes": {}}\'',
        "UPDATE trials SET datetime_start=7",
        "UPDATE trial_user_attributes SET value_json='\"x\"' WHERE key='index'",
        "UPDATE trial_user_attributes SET value_json='null' WHERE key='score'",
        "UPDATE trial_user_attributes SET value_json='\"m:x\"' WHERE key='worker'",
        "UPDATE trial_user_attributes SET value_json='[]' WHERE key='attempt'",
        "UPDATE study_user_attributes SET value_json='{}' WHERE key='settings'",
        """UPDATE study_user_attributes SET value_json=replace(value_json, '"pruner": "', '"pruner": "x')""",
        """UPDATE study_user_attributes SET value_json=replace(value_json, '"trials": 4', '"trials": -4')""",
        "DELETE FROM studies",
    ],
)
def test_a_damaged_storage_is_one_line(change, url, store):
    trial = store.claim("m:1")
    suggest(store, trial)
    store.finish(trial, {"score": 0.5, "cost": 1.0})
    with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as database:
        assert database.execute(change).rowcount
        database.commit()
    with pytest.raises(ConfigError, match="The storage of the sweep x cannot be read: ") as refused:
        read_all(TrialStore(url, "x"))
    assert "\n" not in str(refused.value)


def read_all(store):
    store.create(settings(), exists=True)
    store.open()
    return store.all()


def test_a_study_that_is_lost_is_not_created_again(url):
    with pytest.raises(ConfigError, match="cannot be read"):
        TrialStore(url, "x").create(settings(), exists=True)


@pytest.mark.parametrize("name", ["trials", "seeds"])
def test_more_trials_than_a_sweep_can_have_are_refused(name):
    with pytest.raises(ConfigError, match=f"--{name} 1000000000: give at most 10,000"):
        settings(**{name: 10**9})


def test_passwords_are_not_shown():
    assert shown_url("postgresql://me:secret@host/x") == "postgresql://me:***@host/x"


def test_a_study_of_another_program_is_refused(url, monkeypatch):
    monkeypatch.setattr(trials, "CREATED_WITHIN_S", 0)
    optuna.create_study(storage=url, study_name="x")
    with pytest.raises(ConfigError, match="is no sweep"):
        TrialStore(url, "x").create(settings())
