"""Calls that a trainer makes beside acting and replaying: bootstrap values, None as state, states handed back."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.check.adapters.base import Outputs, PolicyAdapter, flat
from holdfast.check.compare import BOUND, SHORT, State, clone_state, expect_close, has_plain_numbers, state_leaves
from holdfast.check.context import CheckContext
from holdfast.check.policy_copy import HORIZON, STEPS
from holdfast.check.results import Measurement
from holdfast.rng import isolated_rng
from holdfast.types import Tensor

LAST_STARTS = STEPS - 4
"""The step at which every agent starts an episode."""
HUGE = 1e3
"""Size of observations that are large, and finite."""


def overrides(adapter: PolicyAdapter, name: str) -> bool:
    """Whether an adapter has a method of its own in place of the one every adapter has."""
    return getattr(type(adapter), name) is not getattr(PolicyAdapter, name)


def bootstrap_values(context: CheckContext) -> list[Measurement]:
    """The value a segment ends with is the one its next step has."""
    policy, script = context.exact, context.script
    if not overrides(policy.adapter, "value") or policy.has_no_memory:
        return []
    inputs = policy.to_policy(script)
    _, states = policy.steps(script)
    actual, expected = [], []
    with torch.no_grad(), policy.default_dtype():
        for t in range(1, STEPS, 3):
            step = inputs.at(t)
            pair = matching(policy.adapter.value(step, clone_state(states[t])), policy.adapter, step, states[t])
            if pair is None:
                return []
            value, later = pair
            ignored = torch.zeros_like(step.first) if policy.adapter.value_clears else step.first
            ignored = ignored | ~step.valid
            actual.append(torch.where(ignored, later, value))
            expected.append(later)
    what = f"bootstrap value against the value of the next step, {SHORT[policy.kind]}"
    pair = torch.stack(actual, 1).cpu(), torch.stack(expected, 1).cpu()
    return [expect_close(what, *pair, BOUND[policy.kind], path="bootstrap value")]


def matching(value: Outputs, adapter: PolicyAdapter, step: "object", state: State) -> tuple[Tensor, Tensor] | None:
    """Return a bootstrap value and the output of acting that means the same; None if it cannot be told."""
    outputs, _ = adapter.act(step, clone_state(state))  # type: ignore[arg-type]
    names = [name for name in value if name in outputs and value[name].shape == outputs[name].shape]
    if not names:
        similar = [name for name in outputs if "val" in name.lower() or "critic" in name.lower()]
        similar = similar or [name for name in outputs if math.prod(outputs[name].shape[1:]) == 1]
        if len(value) != 1 or len(similar) != 1:
            return None
        one, other = next(iter(value.values())), outputs[similar[0]]
        return (one.reshape(len(one)), other.reshape(len(one))) if one.numel() == other.numel() else None
    size = len(outputs[names[0]])
    stack = [torch.cat([leaves[name].reshape(size, -1) for name in names], 1) for leaves in (value, outputs)]
    # Weighted, so that entries that are exchanged do not cancel.
    weights = torch.arange(1, stack[0].shape[1] + 1, dtype=stack[0].dtype)
    return (stack[0] * weights).sum(1), (stack[1] * weights).sum(1)


def exit_states(context: CheckContext) -> list[Measurement]:
    """The state a segment hands back continues as that of single steps does."""
    policy, script, parts = context.exact, context.script, []
    adapter = policy.adapter
    if not (overrides(adapter, "advance") and adapter.reads_segments) or policy.has_no_memory:
        return []
    expected, states = policy.steps(script)
    for start, length in ((0, HORIZON), (HORIZON, 5), (5, STEPS - 8)):
        batch, stop = script.step_batches(start, start + length), start + length
        with torch.no_grad(), policy.default_dtype():
            after = adapter.advance(policy.to_policy(batch), clone_state(states[start]))
        actual, _ = policy.steps(script, start=stop, stop=min(stop + 6, STEPS), state=after)
        what = f"steps after the state that a segment of {length} hands back, {SHORT[policy.kind]}"
        right = expected[:, stop : stop + actual.shape[1]]
        parts.append(expect_close(what, actual, right, BOUND[policy.kind], columns=context.columns, path="exit state"))
    return parts


def none_as_state(context: CheckContext) -> list[Measurement]:
    """None as a state is the state that an episode starts from."""
    policy, script = context.exact, context.script
    step = policy.to_policy(script).at(0)
    with torch.no_grad(), policy.default_dtype(), isolated_rng(0):
        first, never = (step.with_starts(torch.full_like(step.first, flag)) for flag in (True, False))
        from_none = policy.unused_copy().adapter.act_from_none(never)
        if from_none is None:
            return []
        _, states = policy.steps(script)
        later, _ = policy.adapter.act(first, clone_state(states[LAST_STARTS]))
        started = policy.unused_copy().adapter.act_from_none(first)
    actual, expected = flat(from_none, 1)[:, None].cpu(), flat(later, 1)[:, None].cpu()
    what = f"None as the state against an episode start, {SHORT[policy.kind]}"
    options: dict[str, Any] = {"bound": BOUND[policy.kind], "columns": context.columns, "path": "none state"}
    parts = [expect_close(what, actual, expected, **options)]
    if started is not None:
        what = f"None as the state with episode starts against an episode start, {SHORT[policy.kind]}"
        parts.append(expect_close(what, flat(started, 1)[:, None].cpu(), expected, **options))
    return parts


def episodes_alone(context: CheckContext) -> list[Measurement]:
    """The last episode of every agent goes as if nothing had been before it, whatever a state is made of."""
    policy, script = context.exact, context.script
    if not bool(context.clears[:, LAST_STARTS].all()):
        return []
    actual = context.outputs[policy.dtype].rollout[:, LAST_STARTS:STEPS]
    alone, _ = policy.steps(script, start=LAST_STARTS)
    what = f"each agent's last episode against one from the initial state, {SHORT[policy.kind]}"
    options: dict[str, Any] = {"bound": BOUND[policy.kind], "columns": context.columns, "path": "episode alone"}
    parts = [expect_close(what, actual, alone, **options)]
    _, states = policy.steps(script.without_flags(), stop=LAST_STARTS)
    if has_plain_numbers(states[0]):
        # All rows share such a number, for example a count of steps: it must not show in any episode.
        after = [policy.steps(script, start=LAST_STARTS, state=clone_state(state))[0] for state in states]
        worst = max(after, key=lambda outputs: float((outputs - alone).abs().max()))
        parts.append(expect_close(f"the same, after up to {LAST_STARTS} steps", worst, alone, **options))
    return parts


@torch.no_grad()
def overflowing_states(context: CheckContext) -> list[Measurement]:
    """A state that large observations made infinite is cleared like any other."""
    policy, script = context.exact, context.script
    if not script.obs.is_floating_point() or policy.has_no_memory:
        return []
    inputs = policy.to_policy(script.without_flags())
    with policy.default_dtype():
        state = policy.adapter.initial(script.agents)
        for t in range(3):
            step = inputs.at(t)
            _, state = policy.adapter.act(replace(step, obs=step.obs * HUGE), state)
        if all(bool(leaf.isfinite().all()) for leaf in state_leaves(state) if leaf.is_floating_point()):
            return []
        step = inputs.at(3).with_starts(torch.ones_like(script.first[:, 3]))
        outputs, _ = policy.adapter.act(step, clone_state(state))
    bad = (~flat(outputs, 1).isfinite()).double()[:, None].cpu()
    finding = (
        f"observations of size {HUGE:.0f} make the state infinite, and outputs after the next start are not finite"
    )
    what = "outputs after a start that follows an infinite state"
    return [Measurement(what, float(bad.sum()), finding=finding, path="overflow")]


def evaluation_as_training(context: CheckContext) -> list[Measurement]:
    """Acting in evaluation mode gives the outputs of acting in training mode; one agent alone too."""
    policy, script, parts = context.exact, context.script, []
    if overrides(policy.adapter, "evaluate"):
        return []
    evaluated = policy.evaluate(script)
    options = {"bound": BOUND[policy.kind], "columns": context.columns}
    expected, _ = policy.steps(script)
    parts.append(
        expect_close("evaluation mode against training mode", evaluated, expected, path="evaluation mode", **options)
    )
    few = torch.arange(2)
    alone = torch.cat([policy.evaluate(script[rows]) for rows in few.split(1)])
    what = "one agent alone, in evaluation mode"
    return [*parts, expect_close(what, alone, evaluated[few], path="one agent in evaluation", **options)]


def random_like(state: State, seed: int) -> State:
    """Draw a state of the same structure."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Tensor) -> Tensor:
        if not leaf.is_floating_point():
            return leaf
        return (torch.rand(leaf.shape, generator=generator) - 0.5).to(leaf)

    return pytree.tree_map_only(Tensor, draw, state)
