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

NAMES = ["cut", "carry", "clear", "replay", "isolate", "pure", "bounded", "restore", "agree", "shard"]


def measure_law(policy, law):
    (result,) = measure(prepare(adapt(policy, OnlySpec())), [law])
    return result


def in_both(*names):
    return [f"{name}, {precision}" for precision in ("f64", "f32") for name in names]


STARTS = [
    f"information across starts given by {flags}, live calls of {steps}, {precision}"
    for flags in ("first", "dones", "truncateds")
    for precision in ("f64", "f32")
    for steps in (1, 8)
]
AGREE = ["one segment of 32 steps against single steps", "a batch of one sequence against the full batch"]
CELL = ["cell against its reference", "its state", "its state", "its gradients"]
MEASUREMENTS = {
    "cut": [
        "gradient from act into an earlier act",
        "gradient from replay into an earlier act",
        "gradient from replay into an earlier replay",
        "gradient of values in a replay",
        "gradient of full_log_probs in a replay",
        "hand-written backward of _GatherRows against finite differences",
        "gradient of values to earlier observations against finite differences",
        "gradient of full_log_probs to earlier observations against finite differences",
        "gradients of all parameters against finite differences",
        "gradient from step to step of a segment",
        "gradient across live calls of 1",
        "gradient across live calls of 8",
        "gradient into a replay's entry state",
    ],
    "carry": [
        "information across segment edges, rollout",
        "information across segment edges, replay",
        *in_both("rollouts against one chain of steps"),
        "information from step to step, evaluation",
        "information across each step of a long episode",
    ],
    "clear": [
        "information across episode starts, rollout",
        "information from invalid steps, rollout",
        "information within episodes, rollout",
        "information across episode starts, replay",
        "information from invalid steps, replay",
        "information within episodes, replay",
        "gradient across episode starts",
        *in_both("information across each agent's last episode start, rollout"),
        *in_both("episodes against a rollout from the initial state"),
        "information across each agent's last episode start, evaluation, f64",
        "each agent's last episode against one from the initial state, f64",
        "episodes that start after 70 steps against a run from the initial state, f64",
        *STARTS,
    ],
    "replay": [
        *in_both("values", "full_log_probs"),
        "bootstrap value against the value of the next step, f64",
    ],
    "isolate": [
        *in_both("other rows of the batch changed, rollout", "other rows of the batch changed, replay"),
        "rows permuted, rollout",
        "rows permuted, replay",
        "half of the agents alone",
        "one agent alone",
        "64 agents against 8 at a time, f64",
        "64 segments against 8 agents at a time, f64",
        "agents in two slices",
    ],
    "pure": [
        "outputs after a bootstrap value and a replay",
        "outputs of the same steps repeated",
        "inputs modified by act",
        "inputs modified by value",
        "inputs modified by replay",
        "returned states modified by the next call",
        "live state after bootstrap values and replays",
        "live state after an evaluation",
    ],
    "bounded": ["growth of bytes from 400 to 2,000 steps", "growth of graph nodes from 400 to 2,000 steps"],
    "restore": ["outputs after saving and loading", "outputs after set_memory", "outputs after a snapshot"],
    "agree": [
        *in_both(*AGREE, "short segments against long ones"),
        "3 segments of 7 steps against single steps, f64",
        "7 segments of 3 steps against single steps, f64",
        "one segment of 96 steps against single steps, f64",
        *[f"steps after the state that a segment of {steps} hands back, f64" for steps in (8, 5, 24)],
        *in_both("live segments against steps", *CELL),
        "outputs compiled against eager, f64",
        "gradients compiled against eager, f64",
    ],
    "shard": [
        "actions of a rollout on 2 ranks",
        "act_log_prob of a rollout on 2 ranks",
        "values of a rollout on 2 ranks",
        "weights of the ranks after an update",
        "weights after an update on 2 ranks",
    ],
}


def test_there_are_ten_laws():
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
        "detail",
        "parts",
    }
    assert laws["replay"].measured <= laws["replay"].bound
    assert laws["replay"].finding == ""
    assert {name: [part.what for part in law.parts] for name, law in laws.items()} == MEASUREMENTS


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
