""""""

import math
from io import StringIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from holdfast.config.run import override
from holdfast.evaluation.score import Score
from holdfast.recipes import find_recipe
from holdfast.report.text import (
    BARS,
    MAX_POINTS,
    RunningMeans,
    best_returns_line,
    clock,
    config_difference,
    format_value,
    lookup,
    margin_line,
    short_number,
    sparkline,
    title_of,
)
from holdfast.worlds import make_world

NUMBERS = st.floats(-1e9, 1e9)


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (0, 2, "0"),
        (3.1e-7, 2, "3e-7"),
        (-3.1e-7, 3, "-3.1e-7"),
        (0.041, 2, "0.041"),
        (0.04, 2, "0.04"),
        (6.13, 2, "6.1"),
        (903, 2, "903"),
        (100, 2, "100"),
        (-0.01234, 3, "-0.0123"),
        (12345.6, 2, "12,346"),
        (2e7, 2, "2e7"),
    ],
)
def test_short_number_formats(number, digits, text):
    assert short_number(number, digits) == text


@given(number=st.floats(-1e300, 1e300), digits=st.integers(2, 4))
def test_short_number_is_close_and_short(number, digits):
    text = short_number(number, digits)
    assert len(text) <= 12
    # One digit less where a power of ten is written.
    assert math.isclose(float(text.replace(",", "")), number, rel_tol=0.6 * 10.0 ** (2 - digits), abs_tol=0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (42.4, "0:42"), (59.6, "1:00"), (725, "12:05"), (3723, "1:02:03")]
)
def test_clock_formats(seconds, text):
    assert clock(seconds) == text


def test_spark_of_a_rising_curve():
    assert sparkline(range(8), 8) == BARS
    assert sparkline([5.0, 5.0], 8) == "▁▁"
    assert sparkline([], 8) == sparkline([1.0], 0) == ""


@given(points=st.lists(NUMBERS, min_size=1), width=st.integers(1, 80))
def test_spark_fills_its_width(points, width):
    drawn = sparkline(points, width)
    assert len(drawn) == min(width, len(points))
    assert set(drawn) <= set(BARS)


@given(count=st.integers(0, 5 * MAX_POINTS))
def test_running_means_cover_the_run_in_bounded_memory(count):
    curve = RunningMeans()
    for number in range(count):
        curve.add(float(number))
    assert len(curve.points) < 2 * MAX_POINTS
    assert curve.points == sorted(curve.points)
    if count:
        # The first point is the mean of the first few; the last one is not far from now.
        few = max(1, math.ceil(count / MAX_POINTS))
        assert curve.points[0] <= few
        assert curve.points[-1] >= count - 2 * few - 1


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.1, 0.3, "this one is better"),
        (-0.3, -0.1, "the other is better"),
        (-0.1, 0.3, "not significant"),
        (0.0, 0.0, "not significant"),
    ],
)
def test_lead_line_is_significant_if_the_interval_excludes_zero(low, high, verdict):
    mean = (low + high) / 2
    line = margin_line(Score(mean, (low, high), mean, (low, high)))
    assert line == f"difference {mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}: {verdict}"


def test_best_returns_of_a_world():
    assert best_returns_line(make_world("recall", agents=4).spec) == (
        "best possible return 1.000 · without memory 0.250"
    )
    assert best_returns_line(make_world("arena", agents=24).spec) == ""


RECIPE = find_recipe("recall")


def test_config_difference_lists_changed_keys():
    screen = Console(file=StringIO(), width=100, highlight=False, soft_wrap=True, emoji=False)
    assert config_difference(RECIPE, RECIPE) is None
    table = config_difference(RECIPE, override(RECIPE, {"seed": 5, "world.delay": "2..9"}))
    assert table is not None
    screen.print(table)
    rows = [line.split(maxsplit=2) for line in screen.file.getvalue().splitlines()]
    assert [row[0] for row in rows] == ["key", "seed", "world.delay"]
    assert [cell.strip() for cell in rows[2]] == ["world.delay", "8", "(2, 9)"]
    assert config_difference(RECIPE, override(RECIPE, {"run": "x", "runs_dir": "y"})) is None


def test_lookup_of_a_dotted_key():
    assert lookup(RECIPE, "trainer.ppo.gamma") == 0.9


def test_values_are_formatted_as_typed():
    config = override(RECIPE, {"world": "mixture", "world.parts": "recall delay=4..8 weight=3 + n_back"})
    assert format_value(config.world.parts) == "recall(delay=4..8) weight=3 + n_back weight=1"
    assert format_value(None) == format_value(()) == "none"
    assert format_value(0.5) == "0.5"


def test_title_describes_the_run():
    title = title_of(RECIPE, "my_run", nn.Linear(999, 2), torch.device("cpu"))
    assert list(title.values()) == ["my_run", "recall, 64 agents", "fast, 2,000 parameters", "cpu", "seed 0"]
    assert title["run"] == "my_run"
