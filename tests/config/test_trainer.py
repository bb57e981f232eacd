"""Numbers that change over a run, given by their keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.run import Config, override, read_config
from holdfast.config.trainer import Schedule, TrainerConfig, check_batch_sizes, fit_batch_sizes
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe

BASE = override(find_recipe("recall"), {"schedule": "none"})
RATE = "trainer.optimizer.learning_rate"


def error_message(overrides, base=BASE):
    with pytest.raises(ConfigError) as caught:
        override(base, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_schedule_override_and_constant():
    two = {f"schedule.{RATE}": "linear:0", "schedule.trainer.ppo.ent_coef": "cosine:0.01"}
    config = override(BASE, two)
    assert {each.key for each in config.schedule} == {RATE, "trainer.ppo.ent_coef"}
    other = override(config, {f"schedule.{RATE}": "exponential:1e-5"})
    assert [each.kind for each in other.schedule if each.key == RATE] == ["exponential"]
    assert [each.key for each in override(config, {f"schedule.{RATE}": "constant"}).schedule] == [
        "trainer.ppo.ent_coef"
    ]
    assert override(config, {"schedule": "none"}).schedule == ()
    assert read_config(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("ent_coef", "linear:0", "did you mean schedule.trainer.ppo.ent_coef?"),
        ("trainer.ppo.entcoef", "linear:0", "did you mean trainer.ppo.ent_coef?"),
        ("trainer.batch_size", "linear:0", "is not a number that is read in every iteration"),
        ("world.delay", "linear:4", "is not a number that is read in every iteration"),
        (RATE, "linear", "write KIND:END, for example linear:0, or constant for no schedule."),
        (RATE, "linaer:0", "there is no 'linaer'; did you mean linear?"),
        (RATE, "linear:x", "valid number"),
        (RATE, "exponential:0", "an exponential needs both above 0: use linear or cosine."),
        ("trainer.ppo.gamma", "linear:2", "less than or equal to 1"),
        ("trainer.ppo.target_kl", "linear:1", "it is none; give trainer.ppo.target_kl=NUMBER to start from."),
    ],
)
def test_schedule_errors(key, value, line):
    assert line in error_message({f"schedule.{key}": value})


def test_config_constructor_checks_schedules():
    with pytest.raises(ValueError, match="is not a number that is read in every iteration"):
        Config(schedule=(Schedule(key="trainer.bptt_horizon", kind="linear", end=4),))
    assert "write schedule.KEY=KIND:END" in error_message({"schedule": "linear"})


def test_schedule_none_applies_first():
    recall, single = find_recipe("recall"), {"schedule.trainer.ppo.clip_coef": "linear:0.01"}
    for overrides in ({"schedule": "none", **single}, {**single, "schedule": "none"}):
        assert [each.key for each in override(recall, overrides).schedule] == ["trainer.ppo.clip_coef"]


def test_schedule_text_round_trip():
    config = override(BASE, {"schedule.trainer.ppo.gamma": "linear:0.99912345"})
    key, _, value = f"schedule.{config.schedule[0]}".partition("=")
    assert override(BASE, {key: value}) == config


@given(
    agents=st.integers(1, 300), horizon=st.integers(1, 130), batch=st.integers(1, 5000), minibatch=st.integers(1, 5000)
)
def test_fitting_sizes_train_on_every_step(agents, horizon, batch, minibatch):
    sizes = fit_batch_sizes(agents, horizon, batch, minibatch)
    trainer = TrainerConfig(bptt_horizon=horizon, **{key.removeprefix("trainer."): size for key, size in sizes.items()})
    check_batch_sizes(agents, trainer)
    unit = agents * horizon
    assert trainer.batch_size == unit or abs(trainer.batch_size - batch) <= unit / 2
    if batch % unit == 0 and minibatch % horizon == 0 and batch % minibatch == 0:
        assert (trainer.batch_size, trainer.minibatch_size) == (batch, minibatch)
