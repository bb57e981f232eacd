"""Measurements, laws and their findings."""

import json

import pytest

from holdfast.check import Measurement
from holdfast.check.results import Law, Laws, Pattern


def test_nan_measurement_never_passes():
    assert not Measurement("x", float("nan"), 1.0).ok
    assert not Measurement("x", float("nan"), 0.0, "more than").ok


def test_finding_counts_further_measurements():
    parts = [
        Measurement("a", 0.0, 0.0),
        Measurement("b", 2.0, 1.0, finding="here"),
        Measurement("c", 3.0, 1.0),
    ]
    law = Law("cut", parts, Pattern("p", "w"))
    assert law.finding == "b: here (1 more like it). Pattern: p. Write: w"
    assert not Laws([law]).ok


@pytest.mark.parametrize(
    ("measured", "comparison", "ok"),
    [(1.0, "at most", True), (1.1, "at most", False), (1.0, "more than", False), (1.1, "more than", True)],
)
def test_bound_is_inclusive_for_at_most_only(measured, comparison, ok):
    assert Measurement("x", measured, 1.0, comparison).ok is ok


def test_worst_is_the_broken_measurement_with_the_largest_ratio():
    near, over, far = (Measurement(name, size, 1.0) for name, size in (("a", 0.9), ("b", 2.0), ("c", 3.0)))
    assert Law("cut", [near, Measurement("d", 0.1, 1.0)]).worst is near
    broken = Law("cut", [near, over, far])
    assert (broken.worst, broken.broken, broken.measured) == (far, [over, far], 3.0)
    none = Measurement("e", 0.0, 0.0, "more than")
    assert Law("carry", [far, none]).worst is none


def test_finding_depends_on_the_diagnosis():
    part = Measurement("x", 1.0, 0.0, finding="agent 0")
    assert Law("cut", [part]).finding == "x: agent 0. No known pattern explains these numbers."
    assert Law("cut", [part], diagnosed=False).finding == "x: agent 0."
    not_measured = Measurement("x", 0.0, 0.0, finding="record more", path="n/a")
    assert Law("last", [not_measured]).finding == "record more"
    assert Law("last", [Measurement("x", 0.0, 0.0, finding="agent 0")]).finding == ""


def test_json_has_null_for_numbers_that_are_not_finite_or_not_measured():
    nan = Law("cut", [Measurement("x", float("nan"), 0.0), Measurement("y", float("inf"), 0.0)])
    unmeasured = Law("last", [Measurement("z", 0.0, 0.0, path="n/a")])
    results = json.loads(json.dumps(Laws([nan, unmeasured], notes=["a"]).as_json(), allow_nan=False))
    assert (results["ok"], results["notes"]) == (False, ["a"])
    assert [part["measured"] for part in results["laws"]["cut"]["parts"]] == [None, None]
    assert (results["laws"]["last"]["measured"], results["laws"]["last"]["ok"]) == (None, True)


def test_repr_has_a_line_for_each_law():
    laws = Laws([Law("cut", [Measurement("x", 0.0, 0.0)]), Law("pure", [Measurement("y", 1.0, 0.0)])])
    assert repr(laws) == "cut: holds\npure: y: . No known pattern explains these numbers."
