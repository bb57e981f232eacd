"""The laws of flow: cut, carry, clear and isolate say where gradients and information may go.

The first line of a law's docstring is its sentence on the page of a check.
"""

from dataclasses import replace

import torch

from holdfast.check.call_laws import episodes_alone, none_as_state, overflowing_states
from holdfast.check.compare import AXES, BOUND, SHORT, expect_close, expect_nonzero, expect_zero
from holdfast.check.context import CheckContext
from holdfast.check.gradient_laws import EPSILON, is_smooth, segment_gradients
from holdfast.check.long_laws import late_memory, late_starts, many_rows, variants
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS
from holdfast.check.probes import gradient_of_each
from holdfast.check.results import Measurement, not_measured
from holdfast.check.script import Script
from holdfast.types import Bool, Float, Tensor

MARGIN = 3
"""Steps on either side of a step within which a memory must answer."""


def cut(context: CheckContext) -> list[Measurement]:
    """No gradient crosses a segment edge; within a segment it flows."""
    reach, parts = context.gradient_reach, []
    for source, target in (("act", "act"), ("replay", "act"), ("replay", "replay")):
        gradients = reach.between(source, target)
        what = f"gradient from {source} into an earlier {target}"
        parts.append(expect_zero(what, gradients, "call", "earlier call", path=f"{source} into {target}"))
    for name, size in gradient_of_each(context.exact, context.script).items():
        is_nan = size != size
        finding, path = ("it is NaN", "not a number") if is_nan else ("there is none", "no gradient")
        parts.append(expect_nonzero(f"gradient of {name} in a replay", size, finding, path))
    parts += segment_gradients(context)
    if context.gradient is not None and not context.exact.has_no_memory:
        parts.append(_gradient_to_previous_step(context, context.gradient))
    return parts


def _gradient_to_previous_step(context: CheckContext, gradient: Float[Tensor, "N A N"]) -> Measurement:
    """Require a gradient into the previous step's input, wherever its value and the step's own output have one."""
    what, steps = "gradient from step to step of a segment", torch.arange(STEPS - 1)
    steps = steps[(steps + 1) % HORIZON != 0]
    required = context.must_propagate[steps, :, steps + 1] & (gradient[steps, :, steps] != 0)
    has_gradient = gradient[steps, :, steps + 1] != 0
    if bool((required & ~has_gradient).any()):
        # A gate may keep an observation out of the memory.
        required &= context.information_reach["replay"].amax(-1)[steps, :, steps + 1] != 0
    if bool((required & ~has_gradient).any()) and context.script.obs.is_floating_point():
        # A maximum over time keeps most of them out, as long as they move a little.
        required &= _moves_next_step(context)[steps]
    if bool((required & has_gradient).any()) and not is_smooth(context):
        # Where a gate jumps, values change without a gradient.
        required &= has_gradient
    if not bool(required.any()):
        # A memory may answer later than it reads.
        later = gradient * (
            context.must_propagate & (torch.arange(STEPS)[:, None, None] // HORIZON == torch.arange(STEPS) // HORIZON)
        )
        if bool((later != 0).any()):
            return expect_nonzero(what, float(later.max()), "", "step to step")
        return expect_nonzero(what, 0.0, "there is none at any step", "step to step")
    smallest = gradient[steps, :, steps + 1].masked_fill(~required, torch.inf).amin(1)
    step = int(steps[smallest.argmin()])
    finding = f"no gradient from the output of step {step + 1} to the observation of step {step}, in one segment"
    return expect_nonzero(what, float(smallest.min()), finding, "step to step")


def _moves_next_step(context: CheckContext) -> Bool[Tensor, "N A"]:
    """Return which observations, moved a little, change the next output of their segment."""
    policy, script = context.exact, context.script
    _, states = policy.steps(script)

    def replayed(script: Script) -> Tensor:
        starts = range(0, STEPS, HORIZON)
        return torch.cat([policy.replay(script.step_batches(t, t + HORIZON), states[t]) for t in starts], dim=1)

    base, moves = replayed(script), torch.zeros(STEPS, script.agents, dtype=torch.bool)
    for place in range(HORIZON - 1):
        obs, steps = script.obs.double(), torch.arange(place, STEPS, HORIZON)
        obs[:, steps] += EPSILON * torch.randn(obs[:, steps].shape, generator=torch.Generator().manual_seed(9)).double()
        change = replayed(replace(script, obs=obs))[:, steps + 1] - base[:, steps + 1]
        moves[steps] = (change.abs().amax(-1) > 0).T
    return moves


def carry(context: CheckContext) -> list[Measurement]:
    """Information is carried across segment edges, from segment to segment and rollout to rollout."""
    if context.exact.has_no_memory:
        return [not_measured("nothing: the policy has no memory")]
    parts = [_carried(context, name, diff) for name, diff in context.information_reach.items()]
    for dtype, policy in context.copies.items():
        expected, _ = policy.steps(context.script)
        what = f"rollouts against one chain of steps, {SHORT[dtype]}"
        options = {"columns": context.columns, "path": "rollout"}
        parts.append(expect_close(what, context.outputs[dtype].rollout, expected, BOUND[dtype], **options))
    return [*parts, _carried_in_evaluation(context), *late_memory(context.long_run)]


def _carried(context: CheckContext, name: str, diff: Float[Tensor, "N A N K"]) -> Measurement:
    """Find steps inside episodes that no earlier observation crosses, whatever the observations are."""
    change = diff.amax(-1) * context.must_propagate
    crossing = torch.stack([change[:t, :, t:].amax((0, 2)) for t in range(1, STEPS)], dim=1)
    required = _far_from_starts(context)
    forgotten = required & (crossing == 0)
    steps = forgotten.any(0).nonzero().flatten() + 1
    # Segment edges first; the first step that nothing crosses decides.
    for step in sorted(steps.tolist(), key=lambda step: (step % HORIZON != 0, step)):
        for variant in variants(context.script):
            if not bool(forgotten[:, step - 1].any()):
                break
            forgotten[:, step - 1] &= ~_crosses(context, name, variant, step)
        if bool(forgotten[:, step - 1].any()):
            forgotten[:, torch.arange(STEPS - 1) != step - 1] = False
            break
    smallest = crossing.masked_fill(~required | (crossing == 0), torch.inf)
    size = 0.0 if bool(forgotten.any()) or not bool(required.any()) else float(smallest.min())
    steps = forgotten.any(0).nonzero().flatten() + 1
    edges = steps[steps % HORIZON == 0]
    step = int((edges if len(edges) else steps)[0]) if len(steps) else 0
    agent = int(forgotten[:, step - 1].nonzero()[0]) if len(steps) else 0
    finding = (
        f"agent {agent}: no observation before step {step} changes an output from there on, in any of "
        f"{', '.join(dict.fromkeys(context.columns))}; the longest reach is {_longest(diff)} steps"
    )
    size = 0.0 if size == float("inf") else size
    return expect_nonzero(f"information across segment edges, {name}", size, finding, name)


def _far_from_starts(context: CheckContext) -> Bool[Tensor, "A N"]:
    """Return the steps from the second on with `MARGIN` valid steps of their episode on either side."""
    inside = context.must_propagate
    columns = []
    for t in range(1, STEPS):
        before, after = t - MARGIN, t + MARGIN - 1
        none = torch.zeros(context.script.agents, dtype=torch.bool)
        columns.append(inside[before, :, after] if before >= 0 and after < STEPS else none)
    return torch.stack(columns, dim=1)


def _crosses(context: CheckContext, name: str, script: Script, step: int) -> Bool[Tensor, " A"]:
    """Return for which agents the observations before a step change an output of its episode after it."""
    before = torch.arange(STEPS + 1) < step
    pair = (context.exact.rollout_and_replay(run) for run in (script, script.changed(before.expand_as(script.first))))
    one, other = (getattr(outputs, name) for outputs in pair)
    change = (one - other).abs().amax(-1) * context.must_propagate[step - 1]
    return change[:, step:].amax(1) > 0


def _longest(diff: Float[Tensor, "N A N K"]) -> int:
    """Return the largest number of steps over which an output changes."""
    inputs, _, outputs = diff.amax(-1).nonzero().unbind(1)
    return int((outputs - inputs).max()) if len(inputs) else 0


def _carried_in_evaluation(context: CheckContext) -> Measurement:
    """Change early observations in an evaluation: outputs that change in a rollout must change there too."""
    policy, script, what = context.exact, context.script, "information from step to step, evaluation"
    counts = context.adapter.evaluated_steps(script)
    required = [context.must_propagate[t, :, t + 1] & counts[:, t + 1] for t in range(STEPS - 1)]
    # The last step after which some episodes continue and, if there is one, others start.
    starts = [bool(context.clears[:, t + 1].any()) for t in range(STEPS - 1)]
    step = max(range(STEPS - 1), key=lambda t: (bool(required[t].any()), starts[t], t))
    changed = script.changed((torch.arange(STEPS + 1) <= step).expand_as(script.first))
    expected = (policy.steps(changed)[0] - policy.steps(script)[0]).abs().amax(-1)
    actual = (policy.evaluate(changed) - policy.evaluate(script)).abs().amax(-1)
    until = min(step + 1 + MARGIN, actual.shape[1])
    inside = context.must_propagate[step, :, step + 1 : until] & counts[:, step + 1 : until]
    rows = (expected[:, step + 1 : until] * inside).amax(1) > 0
    sizes = (actual[:, step + 1 : until] * inside).amax(1).masked_fill(~rows, torch.inf)
    finding = (
        f"agent {int(sizes.argmin())}: the observations up to step {step} change the outputs of step {step + 1} in a "
        "rollout, and not in an evaluation"
    )
    return expect_nonzero(what, float(sizes.min()) if bool(rows.any()) else 0.0, finding, "evaluation")


def clear(context: CheckContext) -> list[Measurement]:
    """No information crosses an episode start, in rollout, update and evaluation."""
    if not context.adapter.sees_first:
        return [_not_cleared(context)]
    parts: list[Measurement] = []
    axes, columns = ("input step", "agent", "output step"), context.columns
    invalid = ~context.script.valid[:, :STEPS].T[:, :, None]
    for name, diff in context.information_reach.items():
        across = diff * context.separated_by_reset[..., None]
        what = f"information across episode starts, {name}"
        parts.append(expect_zero(what, across, *axes, columns=columns, path=name))
        if context.adapter.handles_invalid:
            what = f"information from invalid steps, {name}"
            parts.append(expect_zero(what, diff * invalid[..., None], *axes, columns=columns, path=name))
        same_step = torch.eye(STEPS, dtype=torch.bool)[:, None]
        within = float((diff.amax(-1) * (context.must_propagate | same_step)).max())
        finding = "no observation changes any output"
        parts.append(expect_nonzero(f"information within episodes, {name}", within, finding, name))
    if context.gradient is not None:
        gradient = context.gradient.masked_fill(~context.separated_by_reset, 0.0)
        path = "not a number" if bool(gradient.isnan().any()) else "replay"
        parts.append(expect_zero("gradient across episode starts", gradient, *axes, path=path))
    if context.adapter.clear_on != "never":
        parts += [_across_last_start(context, dtype, "rollout") for dtype in context.copies]
        parts += [_as_from_initial_state(context, dtype) for dtype in context.copies]
        parts.append(_across_last_start(context, next(iter(context.copies)), "evaluation"))
        parts += [*none_as_state(context), *episodes_alone(context), *overflowing_states(context)]
        parts += late_starts(context.long_run, context.adapter.clear_on == "episode")
    return parts


def _not_cleared(context: CheckContext) -> Measurement:
    """Return what is known of a policy that gets no episode starts: nothing."""
    if context.exact.has_no_memory:
        return not_measured("nothing: the policy has no memory")
    if not context.adapter.must_clear:
        return not_measured("nothing: the policy gets no episode starts, its caller clears the state")
    what = "cannot clear: the policy gets no episode starts"
    advice = "if its caller clears the state, say so: --no-clear, or check(policy, clear=False)"
    return replace(not_measured(what, advice), required=True)


def _across_last_start(context: CheckContext, dtype: torch.dtype, phase: str) -> Measurement:
    """Change all observations before each agent's last clear; no output from there on may change."""
    before = context.before_last_clear
    policy, changed = context.copies[dtype], context.script.changed(before)
    if phase == "evaluation":
        expected, actual = policy.evaluate(context.script), policy.evaluate(changed)
    else:
        expected, actual = context.outputs[dtype].rollout, policy.rollout_and_replay(changed).rollout
    diff = (actual - expected) * ~before[:, : expected.shape[1], None]
    what = f"information across each agent's last episode start, {phase}, {SHORT[dtype]}"
    return expect_zero(what, diff, *AXES, columns=context.columns, path=phase)


def _as_from_initial_state(context: CheckContext, dtype: torch.dtype) -> Measurement:
    """Put the initial state in at every clear; the rollout must give the same outputs."""
    expected, _ = context.copies[dtype].steps(context.script, reset=context.clears)
    actual = context.outputs[dtype].rollout
    what = f"episodes against a rollout from the initial state, {SHORT[dtype]}"
    return expect_close(what, actual, expected, BOUND[dtype], columns=context.columns, path="rollout")


def isolate(context: CheckContext) -> list[Measurement]:
    """An agent's outputs depend on its own history only."""
    others = torch.ones_like(context.script.first)
    others[0] = False
    parts: list[Measurement] = []
    script, columns, policy = context.script, context.columns, context.exact
    for dtype, policy_copy in context.copies.items():
        changed, base = policy_copy.rollout_and_replay(script.changed(others)), context.outputs[dtype]
        for name in ("rollout", "replay"):
            actual, unchanged = getattr(changed, name)[:1], getattr(base, name)[:1]
            what = f"other rows of the batch changed, {name}, {SHORT[dtype]}"
            if name == "rollout":
                parts.append(expect_zero(what, actual - unchanged, *AXES, columns=columns, path=name))
            else:
                # Packed and padded segments may be summed in another order.
                parts.append(expect_close(what, actual, unchanged, BOUND[dtype], columns=columns, path=name))
    expected, _ = policy.steps(script)
    few, bound = torch.arange(3), BOUND[policy.kind]
    halves, single = (
        torch.cat([policy.steps(script[rows])[0] for rows in split])
        for split in (torch.arange(AGENTS).split(AGENTS // 2), few.split(1))
    )
    return [
        *parts,
        *_permuted(context),
        expect_close("half of the agents alone", halves, expected, bound, columns=columns, path="rollout"),
        expect_close("one agent alone", single, expected[few], bound, columns=columns, path="one agent"),
        *many_rows(context.long_run, context.adapter.sees_first),
    ]


def _permuted(context: CheckContext) -> list[Measurement]:
    """Permute the agents; each must give the same outputs, up to the order of summation."""
    dtype, order = context.exact.kind, torch.arange(AGENTS).roll(2)
    base, permuted = context.outputs[dtype], context.exact.rollout_and_replay(context.script[order])
    return [
        expect_close(
            f"rows permuted, {name}",
            getattr(permuted, name),
            getattr(base, name)[order],
            BOUND[dtype],
            columns=context.columns,
            path=name,
        )
        for name in ("rollout", "replay")
    ]
