import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.check.watch import REPLAY_ALARM
from holdfast.report.memory_row import GRADIENT_ALARM, alarms, memory_cells

WHOLE = {
    "memory/resets": 1204,
    "memory/resets_due": 1204,
    "memory/replay_error": 3.1e-7,
    "memory/replay_value_error": 1e-7,
    "memory/drift": 0.04,
    "memory/gradient_reach": 19,
    "memory/state_norm": 6.13,
    "memory/age_max": 903,
}


def row(metrics, horizon=64):
    return " · ".join(str(cell) for cell in memory_cells(metrics, horizon))


def test_the_row_tells_all_that_was_measured():
    assert row(WHOLE) == (
        "resets 1,204/1,204 ✓ · replay error 3e-7 ✓ · drift 0.04 · grad reach 19/64 · state norm 6.1 · "
        "age max 903"
    )


def test_what_was_not_measured_is_not_told():
    assert row({}) == row({"memory/resets": 4}) == ""
    assert row({"memory/replay_error": 1e-6}) == "replay error 1e-6 ✓"
    assert row({"memory/gradient_reach": 3}, horizon=0) == "grad reach 3"


@given(names=st.sets(st.sampled_from(sorted(WHOLE))))
def test_every_subset_is_told_in_the_same_order(names):
    told = row({name: WHOLE[name] for name in names})
    whole = row(WHOLE)
    places = [whole.index(cell.split(" ")[0]) for cell in told.split(" · ")]
    assert places == sorted(places)


def test_the_larger_of_the_two_errors_is_told():
    assert row({"memory/replay_error": 1e-7, "memory/replay_value_error": 2e-4}) == "replay error 2e-4 ✗"


def test_resets_that_are_not_those_due_are_marked():
    assert row({"memory/resets": 3, "memory/resets_due": 4}) == "resets 3/4 ✗"


def test_a_healthy_run_raises_no_alarm():
    assert list(alarms({})) == list(alarms(WHOLE | {"losses/grad_norm": 0.5})) == []
    edge = {"memory/replay_error": REPLAY_ALARM, "losses/grad_norm": GRADIENT_ALARM}
    assert list(alarms(edge)) == []


@pytest.mark.parametrize(
    ("wrong", "kind", "told"),
    [
        ({"memory/replay_error": 2e-4}, "replay", "differs from living it by 2.0e-04"),
        ({"memory/replay_value_error": 2e-4}, "replay", "differs from living it by 2.0e-04"),
        ({"memory/resets": 1203}, "resets", "cleared 1,203 times where 1,204 starts were due"),
        ({"losses/grad_norm": 0.0}, "gradient", "exactly 0"),
        ({"losses/grad_norm": 12345.0}, "gradient", "12,345 long before clipping; below 1,000 is healthy"),
    ],
)
def test_what_is_wrong_raises_an_alarm_that_says_what_to_do(wrong, kind, told):
    ((of, text),) = alarms(WHOLE | wrong)
    assert of == kind
    assert told in text
    assert "`holdfast check`" in text or "Look for" in text or "lower trainer." in text
