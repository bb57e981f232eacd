import pytest

from holdfast.experience import Score
from holdfast.report.scores import bests, lead_line
from holdfast.worlds import make_world


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.1, 0.3, "this one is better"),
        (-0.3, -0.1, "the other is better"),
        (-0.1, 0.3, "chance explains it"),
        (0.0, 0.0, "chance explains it"),
    ],
)
def test_a_lead_that_may_be_none_is_chance(low, high, told):
    mean = (low + high) / 2
    line = lead_line(Score(mean, (low, high), mean, (low, high)))
    assert line == f"difference {mean:+.3f}, from {low:+.3f} to {high:+.3f}: {told}"


def test_the_bests_are_told_where_a_world_knows_them():
    assert bests(make_world("recall", agents=4).spec) == (
        "the best there is 1.000 · the best without memory 0.250"
    )
    assert bests(make_world("arena", agents=24).spec) == ""
