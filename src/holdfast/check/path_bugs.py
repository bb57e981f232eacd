"""Known bugs of two paths: which state a bootstrap value is of, and where a long segment is broken up."""

import torch

from holdfast.check.call_laws import matching
from holdfast.check.compare import clone_state
from holdfast.check.context import CheckContext
from holdfast.check.long_laws import LONG
from holdfast.check.policy_copy import AGENTS, STEPS

BOOTSTRAP = "bootstrap value of another state"
TOO_LONG = "long segments are read differently"
ROUNDING = 1e-6


def source_of_bootstrap(context: CheckContext) -> str | None:
    """Find the state whose value the bootstrap value is."""
    policy, script = context.exact, context.script
    _, states = policy.steps(script)
    t = next(at for at in range(4, STEPS) if int((~context.clears[:, at]).sum()) > AGENTS // 2)
    step = policy.to_policy(script).at(t)
    with torch.no_grad(), policy.default_dtype():
        value = policy.adapter.value(step, clone_state(states[t]))
        others = {
            "of zeros": (step, policy.adapter.initial(AGENTS)),
            "of the state one step earlier": (step, states[t - 1]),
            "of the state one step later": (step, states[t + 1]),
            "of the state that is not cleared": (step.without_flags(), states[t]),
        }
        for detail, (other_step, state) in others.items():
            pair = matching(value, policy.adapter, other_step, state)
            if pair is not None and torch.allclose(*pair, atol=1e-9):
                return detail
    return None


def long_segment_bug(context: CheckContext) -> tuple[str, str] | None:
    """Name what is wrong with a long segment: its chunks, or the first wrong step; None: its values are right."""
    run = context.long_run
    policy, few = run.policy, torch.arange(min(6, run.rows))
    expected, states = run.chain[0][few], run.chain[1]
    script, entry = run.script[few], policy.rows.pick(states[0], few)
    measured = policy.replay(script.step_batches(0, LONG), entry)
    wrong = ((measured - expected).abs().amax((0, 2)) > ROUNDING).nonzero().flatten()
    if not len(wrong):
        return None
    length = int(wrong[0])
    if length:
        edges = (torch.arange(LONG + 1) % length == 0).expand(len(few), -1)
        predicted, _ = policy.steps(script, reset=edges | script.first)
        if torch.allclose(predicted, measured, atol=ROUNDING):
            return f"segments are read in chunks of {length} from zeros", ""
    return TOO_LONG, f"from step {length} on"
