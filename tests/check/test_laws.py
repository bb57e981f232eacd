from functools import cache

import pytest

import holdfast
from helpers import broken_policies as own
from helpers.small_policy import OnlySpec, Small, make_small
from holdfast.check.adapters import adapt
from holdfast.check.context import prepare
from holdfast.check.laws import LAWS, measure

# Without jaxtyping checks, which run in the tests of the modules, because these tests make many calls.
pytestmark = pytest.mark.usefixtures("annotations_asleep")

NAMES = ["cut", "carry", "clear", "replay", "isolate", "pure", "bounded", "restore", "agree"]


def measure_law(policy, law):
    (result,) = measure(prepare(adapt(policy, OnlySpec())), [law])
    return result


def test_there_are_nine_laws():
    assert list(LAWS) == NAMES


def test_correct_policy_obeys_every_law_and_as_json_has_the_keys():
    laws = holdfast.check(make_small(), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert list(laws) == NAMES
    results = laws.as_json()
    assert results["ok"] is True
    assert set(results["laws"]["replay"]) == {
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


@cache
def laws_without_reset():
    return holdfast.check(make_small(own.NoClear), OnlySpec())


@pytest.mark.parametrize("law", [name for name in NAMES if name not in ("clear", "replay", "agree")])
def test_policy_without_reset_obeys_the_other_laws(law):
    assert laws_without_reset()[law].ok


def test_check_does_not_modify_the_policy():
    policy = make_small()
    before = {key: leaf.clone() for key, leaf in policy.state_dict().items()}
    measure_law(policy, "restore")
    assert all(leaf.equal(before[key]) for key, leaf in policy.state_dict().items())
    assert not policy.store.slices


def test_finding_names_agent_step_output_size_pattern_and_fix():
    laws = holdfast.check(make_small(own.LateClear), OnlySpec())
    finding = laws["clear"].finding
    for text in (
        "agent 0",
        "output step",
        "values",
        "changes by",
        "Pattern: state reset one step late",
        "Write:",
    ):
        assert text in finding
    result = laws.as_json()["laws"]["clear"]
    assert result["pattern"] == "state reset one step late"
    assert "torch.where(first" in result["write"]


def test_laws_have_the_reach_arrays():
    reach = laws_without_reset().reach
    across = reach.clears.long().cumsum(1)
    leaks = reach.rollout * (across.T[:, :, None] < across[None])
    assert leaks.max() > 0
    assert reach.rollout.shape == reach.replay.shape == reach.gradient.shape == (32, 8, 32)
    within_segment = reach.gradient[3, :, 4].min()
    assert within_segment > 0
    assert reach.gradient[7, :, 8].max() == 0


def test_small_policy_is_small():
    assert sum(p.numel() for p in Small().parameters()) < 10_000
