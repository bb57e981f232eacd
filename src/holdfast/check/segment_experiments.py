"""Experiments on segments that no listed bug explains: whether flags, returned states or outputs differ from steps."""

import torch

from holdfast.check.adapters.base import PolicyAdapter
from holdfast.check.compare import BOUND, clone_state, state_leaves
from holdfast.check.policy_copy import HORIZON, PolicyCopy
from holdfast.check.script import Script
from holdfast.check.segment_diagnosis import SegmentBug
from holdfast.monitor.replay_check import largest_allowed
from holdfast.types import Bool, Tensor

IGNORED, STICKY = "some of a segment's flags are ignored", "a segment's flags reset later steps too"
CHANGED = "the state of a segment is not that of its steps"
OUTPUTS = "outputs of a segment are computed in another way"


@torch.no_grad()
def segment_experiment(policy: PolicyCopy, script: Script) -> SegmentBug | None:
    """Find out what makes segments differ from single steps; None if they do not differ."""
    never = torch.zeros_like(script.first)
    if _differs(policy, script.with_starts(never)):
        return _changed_state(policy, script.with_starts(never))
    wrong = [step for step in range(HORIZON) if _differs(policy, script.with_starts(_only(never, step)))]
    if wrong:
        detail = "" if len(wrong) == HORIZON else f"those of steps {', '.join(map(str, wrong))}"
        starts = _only(never, wrong[0])
        sticks = not _differs(policy, script.with_starts(starts), reset=starts.cummax(1).values)
        return SegmentBug(STICKY if sticks else IGNORED, detail)
    return SegmentBug(IGNORED, "where several are set") if _differs(policy, script) else None


def _only(never: Bool[Tensor, "A N1"], step: int) -> Bool[Tensor, "A N1"]:
    first = never.clone()
    first[:, step] = True
    return first


def _differs(policy: PolicyCopy, script: Script, reset: Bool[Tensor, "A N1"] | None = None) -> bool:
    """Whether a segment gives other outputs than single steps, which are told to start where its flags are."""
    reset = script.first if reset is None else reset
    expected, states = policy.steps(script.without_flags(), stop=HORIZON, reset=reset)
    actual = policy.replay(script.step_batches(0, HORIZON), clone_state(states[0]))
    return not _same(policy, actual, expected)


def _same(policy: PolicyCopy, actual: Tensor, expected: Tensor) -> bool:
    bound = largest_allowed(BOUND[policy.kind]) * max(1.0, float(expected.abs().max()))
    return float((actual - expected).abs().max()) <= bound


def _changed_state(policy: PolicyCopy, script: Script) -> SegmentBug | None:
    """Tell a state that differs from outputs that differ, by the state that a segment returns."""
    adapter = policy.adapter
    if type(adapter).advance is PolicyAdapter.advance:
        return None
    _, states = policy.steps(script, stop=HORIZON)
    with policy.default_dtype():
        inputs = policy.to_policy(script)
        after = adapter.advance(inputs.step_batches(0, HORIZON), clone_state(states[0]))
    pairs = zip(state_leaves(after), state_leaves(states[HORIZON]), strict=True)
    same = all(_same(policy, one.double().cpu(), other.double().cpu()) for one, other in pairs)
    return SegmentBug(OUTPUTS if same else CHANGED)
