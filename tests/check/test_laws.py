import pytest

import holdfast
from check.sabotages import COLLECTORS, ON_FAST, POLICIES, DeafToTrials, LateClear, NoClear
from holdfast.check import probes
from holdfast.check.laws import LAWS, measure
from small import OnlySpec, Small, make_small

# These tests live many short lives; the checks of shapes run in the tests of the parts they are made of.
pytestmark = pytest.mark.usefixtures("annotations_asleep")

NAMES = ["cut", "carry", "clear", "replay", "isolate", "pure", "bounded", "restore", "agree"]


def verdict(policy, law):
    (found,) = measure(policy, OnlySpec(), [law])
    return found


def test_there_are_nine_laws():
    assert list(LAWS) == NAMES


@pytest.mark.parametrize("options", [{}, {"num_layers": 1}, {"num_layers": 3, "hidden_size": 7}])
def test_a_correct_policy_obeys_every_law(options):
    laws = holdfast.check(make_small(**options), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert list(laws) == NAMES


@pytest.mark.parametrize(("sabotage", "law"), POLICIES, ids=lambda part: getattr(part, "__name__", part))
def test_a_sabotaged_policy_is_caught(sabotage, law):
    found = verdict(make_small(sabotage), law)
    assert not found.ok
    assert found.finding


@pytest.mark.parametrize(("sabotage", "law"), ON_FAST, ids=lambda part: getattr(part, "__name__", part))
def test_a_sabotaged_fast_is_caught_although_it_says_little(sabotage, law):
    (found,) = measure(make_small(sabotage), holdfast.make_world("recall", agents=1), [law])
    assert not found.ok
    assert found.finding


@pytest.mark.parametrize("clear_on", ["trial", "never"])
def test_what_clears_is_read_from_the_policy(clear_on):
    laws = {
        name: verdict(make_small(clear_on=clear_on), name) for name in ("carry", "clear", "replay", "agree")
    }
    assert all(law.ok for law in laws.values()), {name: law.finding for name, law in laws.items()}


def test_a_policy_that_takes_no_notice_of_trials_is_caught():
    assert not verdict(make_small(DeafToTrials, clear_on="trial"), "clear").ok


@pytest.mark.parametrize(("sabotage", "law"), COLLECTORS, ids=lambda part: getattr(part, "__name__", part))
def test_a_sabotaged_collector_is_caught(monkeypatch, sabotage, law):
    assert verdict(make_small(), law).ok
    monkeypatch.setattr(probes, "Collector", sabotage)
    found = verdict(make_small(), law)
    assert not found.ok
    assert found.finding


@pytest.mark.parametrize("law", [name for name in NAMES if name not in ("clear", "replay", "agree")])
def test_a_policy_that_never_clears_breaks_only_what_it_breaks(law):
    assert verdict(make_small(NoClear), law).ok


def test_the_policy_under_test_is_left_alone():
    policy = make_small()
    before = {key: leaf.clone() for key, leaf in policy.state_dict().items()}
    verdict(policy, "restore")
    assert all(leaf.equal(before[key]) for key, leaf in policy.state_dict().items())
    assert not policy.store.slices


def test_a_finding_names_the_agent_and_the_step():
    finding = verdict(make_small(LateClear), "clear").finding
    assert "agent" in finding
    assert "step" in finding


def test_verdicts_read_as_promised():
    laws = holdfast.check(make_small(), OnlySpec())
    told = laws.as_json()
    assert told["ok"] is True
    assert set(told["laws"]["replay"]) == {"measured", "bound", "ok", "finding", "parts"}
    assert laws["replay"].measured <= laws["replay"].bound
    assert laws["replay"].finding == ""


def test_measurements_that_are_not_numbers_never_pass():
    from holdfast.check import Measurement

    assert not Measurement("x", float("nan"), 1.0).ok
    assert not Measurement("x", float("nan"), 0.0, "more than").ok


def test_small_is_what_it_says():
    assert sum(p.numel() for p in Small().parameters()) < 10_000
