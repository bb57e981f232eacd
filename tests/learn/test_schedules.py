import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config.run import override
from holdfast.config.trainer import SCHEDULED, Schedule
from holdfast.learn.optimizers import schedule_value, trainer_config_at
from holdfast.recipes import find_recipe

MOVING = ("linear", "cosine", "exponential", "logarithmic")
ends = st.floats(1e-9, 1e3)
anywhere = st.floats(-1e3, 1e3)
shares = st.floats(0, 1)
BASE = override(find_recipe("recall"), {"schedule": "none"})
RATE = "trainer.optimizer.learning_rate"


@pytest.mark.parametrize(
    ("kind", "start", "end", "half"),
    [
        ("constant", 8.0, 2.0, 8.0),
        ("linear", 8.0, 2.0, 5.0),
        ("cosine", 8.0, 2.0, 5.0),
        ("exponential", 8.0, 2.0, 4.0),  # 8 / sqrt(4)
        ("logarithmic", 8.0, 2.0, 8 - 6 * math.log(5.5) / math.log(10)),
        ("exponential", 2.0, 8.0, 4.0),
        ("linear", 1.0, -1.0, 0.0),
    ],
)
def test_schedule_at_half_by_hand(kind, start, end, half):
    assert schedule_value(kind, start, end, 0.5) == pytest.approx(half, rel=1e-12, abs=1e-12)


def test_cosine_schedule_at_a_third_by_hand():
    # cos(60 degrees) = 1/2: a quarter of the height.
    assert schedule_value("cosine", 0.0, 4.0, 1 / 3) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("kind", MOVING)
@given(start=ends, end=ends)
def test_schedule_ends_are_exact(kind, start, end):
    assert [schedule_value(kind, start, end, p) for p in (-0.5, 0.0)] == [start, start]
    assert [schedule_value(kind, start, end, p) for p in (1.0, 1.5)] == [end, end]


@pytest.mark.parametrize("kind", MOVING)
@given(start=ends, end=ends, sooner=shares, later=shares)
def test_schedule_is_monotonic_and_bounded(kind, start, end, sooner, later):
    first, second = (schedule_value(kind, start, end, p) for p in sorted((sooner, later)))
    low, high = (first, second) if start <= end else (second, first)
    slack = 1e-12 * max(start, end)
    assert low <= high + slack
    assert min(start, end) <= low
    assert high <= max(start, end)


@pytest.mark.parametrize(
    ("kind", "start", "end", "progress"),
    [
        ("cosine", 0.9, 1e-17, 1 - 1e-9),  # 0.9 + (1e-17 - 0.9) is 0
        ("exponential", 0.7018159292640187, 0.42353035093429003, 1 - 2**-53),
    ],
)
def test_schedule_rounding_stays_between_ends(kind, start, end, progress):
    assert schedule_value(kind, start, end, progress) == end


@given(start=anywhere, end=anywhere, progress=shares)
def test_constant_schedule(start, end, progress):
    assert schedule_value("constant", start, end, progress) == start


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("start", "end"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (-1.0, -2.0)])
def test_an_exponential_schedule_needs_ends_above_zero(start, end, progress):
    with pytest.raises(ValueError, match="both ends must be greater than 0; take linear"):
        schedule_value("exponential", start, end, progress)


@given(start=anywhere, end=anywhere, progress=st.floats(0.001, 0.999))
def test_linear_schedule_formula(start, end, progress):
    value = schedule_value("linear", start, end, progress)
    between = min(max(start + (end - start) * progress, min(start, end)), max(start, end))
    assert value == between


def number(config, key, progress):
    value = trainer_config_at(config, progress)
    for part in key.split(".")[1:]:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("linear", 0.5e-3), ("cosine", 0.5e-3), ("exponential", 1e-4), ("logarithmic", 2.66e-4)],
)
def test_schedule_goes_from_value_to_end(kind, middle):
    config = override(BASE, {RATE: 1e-3, f"schedule.{RATE}": f"{kind}:1e-5"})
    assert config.schedule == (Schedule(key=RATE, kind=kind, end=1e-5),)
    assert number(config, RATE, 0.0) == 1e-3
    assert number(config, RATE, 0.5) == pytest.approx(middle, rel=0.02)
    assert number(config, RATE, 1.0) == 1e-5


def test_all_scheduled_keys():
    for key in SCHEDULED:
        start = number(BASE, key, 0.0)
        config = override(BASE, {key: 0.4 if start is None else start, f"schedule.{key}": "linear:0.5"})
        assert number(config, key, 1.0) == 0.5
        assert number(config, key, 0.5) == pytest.approx((number(config, key, 0.0) + 0.5) / 2)
        # All others stay.
        moved = trainer_config_at(config, 0.5).model_dump()
        still = config.trainer.model_dump()
        differ = {
            name for name in still if name not in ("optimizer", "ppo", "sampling") and still[name] != moved[name]
        } | {
            f"{branch}.{name}"
            for branch in ("optimizer", "ppo", "sampling")
            for name in still[branch]
            if still[branch][name] != moved[branch][name]
        }
        assert differ <= {key.removeprefix("trainer.")}
