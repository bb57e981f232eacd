import pytest

import holdfast
from check import own
from holdfast.check import Measurement
from holdfast.check.bench import set_up
from holdfast.check.laws import LAWS, measure
from holdfast.check.results import Law, Laws, Pattern
from holdfast.check.subjects.find import subject_of
from small import OnlySpec, Small, make_small

# These tests live many short lives; the checks of shapes run in the tests of the parts they are made of.
pytestmark = pytest.mark.usefixtures("annotations_asleep")

NAMES = ["cut", "carry", "clear", "replay", "isolate", "pure", "bounded", "restore", "agree"]


def verdict(policy, law):
    (found,) = measure(set_up(subject_of(policy, OnlySpec())), [law])
    return found


def test_there_are_nine_laws():
    assert list(LAWS) == NAMES


def test_a_correct_policy_obeys_every_law():
    laws = holdfast.check(make_small(), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert list(laws) == NAMES
    told = laws.as_json()
    assert told["ok"] is True
    assert set(told["laws"]["replay"]) == {
        "measured",
        "bound",
        "sense",
        "ok",
        "finding",
        "pattern",
        "write",
        "parts",
    }
    assert laws["replay"].measured <= laws["replay"].bound
    assert laws["replay"].finding == ""


@pytest.mark.parametrize("law", [name for name in NAMES if name not in ("clear", "replay", "agree")])
def test_a_policy_that_never_clears_breaks_only_what_it_breaks(law):
    assert verdict(make_small(own.NoClear), law).ok


def test_the_policy_under_test_is_left_alone():
    policy = make_small()
    before = {key: leaf.clone() for key, leaf in policy.state_dict().items()}
    verdict(policy, "restore")
    assert all(leaf.equal(before[key]) for key, leaf in policy.state_dict().items())
    assert not policy.store.slices


def test_a_finding_names_agent_step_tensor_size_pattern_and_line():
    laws = holdfast.check(make_small(own.LateClear), OnlySpec())
    finding = laws["clear"].finding
    for told in (
        "agent 0",
        "felt at step",
        "values",
        "moves by",
        "Pattern: state cleared one step late",
        "Write:",
    ):
        assert told in finding
    told = laws.as_json()["laws"]["clear"]
    assert told["pattern"] == "state cleared one step late"
    assert "torch.where(first" in told["write"]


def test_the_arrays_the_laws_assert_on_are_handed_out():
    reach = holdfast.check(make_small(own.NoClear), OnlySpec()).reach
    across = reach.clears.long().cumsum(1)
    leaks = reach.lived * (across.T[:, :, None] < across[None])
    assert leaks.max() > 0
    assert reach.lived.shape == reach.replayed.shape == reach.gradient.shape == (32, 8, 32)
    within_segment = reach.gradient[3, :, 4].min()
    assert within_segment > 0
    assert reach.gradient[7, :, 8].max() == 0


def test_measurements_that_are_not_numbers_never_pass():
    assert not Measurement("x", float("nan"), 1.0).ok
    assert not Measurement("x", float("nan"), 0.0, "more than").ok


def test_a_law_tells_the_first_place_and_how_many_more():
    parts = [
        Measurement("a", 0.0, 0.0),
        Measurement("b", 2.0, 1.0, finding="here"),
        Measurement("c", 3.0, 1.0),
    ]
    law = Law("cut", parts, Pattern("p", "w"))
    assert law.finding == "b: here (1 more like it). Pattern: p. Write: w"
    assert not Laws([law]).ok


def test_small_is_what_it_says():
    assert sum(p.numel() for p in Small().parameters()) < 10_000
