"""Numbers that change over a run, given by their keys."""

import pytest

from holdfast.config import Config, change, read_config
from holdfast.errors import ConfigError
from holdfast.learn import knobs_at
from holdfast.recipes import find_recipe
from holdfast.trainer_knobs import SCHEDULED, Schedule

BASE = change(find_recipe("recall"), {"schedule": "none"})
RATE = "trainer.optimizer.learning_rate"


def told(overrides, base=BASE):
    with pytest.raises(ConfigError) as caught:
        change(base, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def number(config, key, progress):
    found = knobs_at(config, progress)
    for part in key.split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("linear", 0.5e-3), ("cosine", 0.5e-3), ("exponential", 1e-4), ("logarithmic", 2.66e-4)],
)
def test_a_number_goes_from_its_value_to_the_end_named(kind, middle):
    config = change(BASE, {RATE: 1e-3, f"schedule.{RATE}": f"{kind}:1e-5"})
    assert config.schedule == (Schedule(key=RATE, kind=kind, end=1e-5),)
    assert number(config, RATE, 0.0) == 1e-3
    assert number(config, RATE, 0.5) == pytest.approx(middle, rel=0.02)
    assert number(config, RATE, 1.0) == 1e-5


def test_every_number_that_is_read_in_every_iteration_can_be_scheduled():
    for key in SCHEDULED:
        start = number(BASE, key, 0.0)
        config = change(BASE, {key: 0.4 if start is None else start, f"schedule.{key}": "linear:0.5"})
        assert number(config, key, 1.0) == 0.5
        assert number(config, key, 0.5) == pytest.approx((number(config, key, 0.0) + 0.5) / 2)
        # All others stay.
        moved = knobs_at(config, 0.5).model_dump()
        still = config.trainer.model_dump()
        differ = {
            name
            for name in still
            if name not in ("optimizer", "ppo", "sampling") and still[name] != moved[name]
        } | {
            f"{branch}.{name}"
            for branch in ("optimizer", "ppo", "sampling")
            for name in still[branch]
            if still[branch][name] != moved[branch][name]
        }
        assert differ <= {key.removeprefix("trainer.")}


def test_schedules_replace_one_another_and_constant_is_none():
    two = {f"schedule.{RATE}": "linear:0", "schedule.trainer.ppo.ent_coef": "cosine:0.01"}
    config = change(BASE, two)
    assert {each.key for each in config.schedule} == {RATE, "trainer.ppo.ent_coef"}
    other = change(config, {f"schedule.{RATE}": "exponential:1e-5"})
    assert [each.kind for each in other.schedule if each.key == RATE] == ["exponential"]
    assert [each.key for each in change(config, {f"schedule.{RATE}": "constant"}).schedule] == [
        "trainer.ppo.ent_coef"
    ]
    assert change(config, {"schedule": "none"}).schedule == ()
    assert read_config(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("ent_coef", "linear:0", "did you mean schedule.trainer.ppo.ent_coef?"),
        ("trainer.ppo.entcoef", "linear:0", "did you mean trainer.ppo.ent_coef?"),
        ("trainer.batch_size", "linear:0", "that is no number which is read in every iteration"),
        ("world.delay", "linear:4", "that is no number which is read in every iteration"),
        (RATE, "linear", "write KIND:END, for example linear:0, or constant for no schedule."),
        (RATE, "linaer:0", "there is no 'linaer'; did you mean linear?"),
        (RATE, "linear:x", "valid number"),
        (RATE, "exponential:0", "an exponential needs both above 0: use linear or cosine."),
        ("trainer.ppo.gamma", "linear:2", "less than or equal to 1"),
        ("trainer.ppo.target_kl", "linear:1", "it is none; give trainer.ppo.target_kl=NUMBER to start from."),
    ],
)
def test_what_cannot_be_scheduled_is_told_in_one_line(key, value, line):
    assert line in told({f"schedule.{key}": value})


def test_a_schedule_of_another_config_is_checked_like_any_other():
    with pytest.raises(ValueError, match="it is read once, when a run begins, or is no number"):
        Config(schedule=(Schedule(key="trainer.bptt_horizon", kind="linear", end=4),))
    assert "write schedule.KEY=KIND:END" in told({"schedule": "linear"})


def test_none_comes_before_single_schedules_wherever_it_stands():
    recall, single = find_recipe("recall"), {"schedule.trainer.ppo.clip_coef": "linear:0.01"}
    for overrides in ({"schedule": "none", **single}, {**single, "schedule": "none"}):
        assert [each.key for each in change(recall, overrides).schedule] == ["trainer.ppo.clip_coef"]


def test_what_is_printed_can_be_typed_again():
    config = change(BASE, {"schedule.trainer.ppo.gamma": "linear:0.99912345"})
    key, _, value = f"schedule.{config.schedule[0]}".partition("=")
    assert change(BASE, {key: value}) == config
