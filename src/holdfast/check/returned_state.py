"""Known bugs of the state that a call returns: what a single step hands to the next one, and a segment does not use."""

from collections.abc import Callable, Iterator
from itertools import combinations, permutations

import torch

from holdfast.check.adapters.base import flat
from holdfast.check.call_laws import random_like
from holdfast.check.compare import State, clone_state, named_leaves, state_leaves, with_leaves
from holdfast.check.policy_copy import HORIZON, PolicyCopy
from holdfast.check.script import Script
from holdfast.check.segment_bugs import roundings
from holdfast.check.segment_diagnosis import SegmentBug
from holdfast.types import Float, Tensor

SWAPPED, OTHER_ROWS = "parts of the returned state are swapped", "the returned state is of other rows"
ROUNDED, LOST = "the returned state is rounded", "part of the returned state is lost"
OLD, ZEROS = "the returned state is the one before the last step", "every call starts from zeros"
ROUNDING = 1e-9


@torch.no_grad()
def returned_state_bug(policy: PolicyCopy, script: Script) -> SegmentBug | None:
    """Find out what is wrong with the states that single steps return, if segments do not read them."""
    script = script.without_flags()
    _, states = policy.steps(script, stop=HORIZON)
    measured = policy.replay(script.step_batches(0, HORIZON), states[0])
    for name, undo in _rearrangements(policy):
        if float((_chain(policy, script, undo) - measured).abs().max()) <= ROUNDING:
            return SegmentBug(name)
    error = float((_chain(policy, script, lambda state: state) - measured).abs().max())
    return _kept_or_lost(policy, script, states) or _rounded(states, error)


@torch.no_grad()
def returns_its_input(policy: PolicyCopy, script: Script) -> bool:
    """Whether a step returns the state that it read, and no new one."""
    with policy.default_dtype():
        state = random_like(policy.adapter.initial(script.agents), 2)
        _, after = policy.adapter.act(policy.to_policy(script.without_flags()).at(1), clone_state(state))
    pairs = zip(state_leaves(state), state_leaves(after), strict=True)
    return all(after.equal(before) for before, after in pairs if before.is_floating_point())


def _chain(policy: PolicyCopy, script: Script, change: Callable[[State], State]) -> Float[Tensor, "A T K"]:
    """Run single steps, with changed states between them."""
    outputs = []
    with policy.default_dtype():
        state, inputs = policy.adapter.initial(script.agents), policy.to_policy(script)
        for t in range(HORIZON):
            step_outputs, state = policy.adapter.act(inputs.at(t), state)
            outputs.append(flat(step_outputs, 1))
            state = change(clone_state(state))
    return torch.stack(outputs, dim=1).cpu()


def _rearrangements(policy: PolicyCopy) -> Iterator[tuple[str, Callable[[State], State]]]:
    """List what undoes an exchange of tensors, layers, units or rows."""
    with policy.default_dtype():
        leaves = state_leaves(policy.adapter.initial(3))
    axes = policy.rows.axes
    for order in permutations(range(len(leaves))) if 1 < len(leaves) <= 4 else ():
        if list(order) != sorted(order) and all(leaves[i].shape == leaves[n].shape for n, i in enumerate(order)):
            yield SWAPPED, lambda state, order=order: with_leaves(state, [state_leaves(state)[i] for i in order])
    for axis in range(max((leaf.dim() for leaf in leaves), default=0)):
        for name, change in (("", torch.flip), ("", _later), ("", _earlier)):
            for of_rows in (False, True):
                fits = [
                    leaf.dim() > axis and (axis == rows) == of_rows for leaf, rows in zip(leaves, axes, strict=True)
                ]
                if any(fits):
                    name = OTHER_ROWS if of_rows else SWAPPED
                    yield name, lambda state, fits=fits, change=change, axis=axis: _each(state, fits, change, axis)


def _each(state: State, fits: list[bool], change: Callable[..., Tensor], axis: int) -> State:
    return with_leaves(
        state, [change(leaf, (axis,)) if fit else leaf for leaf, fit in zip(state_leaves(state), fits, strict=True)]
    )


def _later(leaf: Tensor, axes: tuple[int, ...]) -> Tensor:
    return leaf.roll(1, axes[0])


def _earlier(leaf: Tensor, axes: tuple[int, ...]) -> Tensor:
    return leaf.roll(-1, axes[0])


def _kept_or_lost(policy: PolicyCopy, script: Script, states: list[State]) -> SegmentBug | None:
    """Whether tensors of the state are never changed by a step."""
    names = [name for name, leaf in named_leaves(states[0]).items() if leaf.is_floating_point()]
    still = [
        name
        for name in names
        if all(named_leaves(state)[name].equal(named_leaves(states[0])[name]) for state in states)
    ]
    if not still:
        return _duplicated(states, names)
    if len(still) < len(names):
        return SegmentBug(LOST, f"the state{', '.join(still)} is always the initial one")
    return SegmentBug(OLD if returns_its_input(policy, script) else ZEROS)


def _duplicated(states: list[State], names: list[str]) -> SegmentBug | None:
    """Whether a tensor that came after a step always equals another one."""
    for one, other in combinations(names, 2):
        pairs = [(named_leaves(state)[one], named_leaves(state)[other]) for state in states[1:]]
        if all(a.equal(b) for a, b in pairs):
            return SegmentBug(LOST, f"the state{other} is always the state{one}")
    return None


def _rounded(states: list[State], error: float) -> SegmentBug | None:
    """Whether all numbers of the states that came after a step are rounded, and outputs differ by no more than that."""
    rows = [leaf for state in states[1:] for leaf in state_leaves(state) if leaf.dtype == torch.float64]
    if not rows:
        return None
    numbers, range_ = (
        torch.cat([leaf.flatten() for leaf in rows]),
        torch.linspace(-1, 0.987654, 997, dtype=torch.float64),
    )
    for detail, change in roundings():
        step = float((change(range_) - range_).abs().max())
        # Observations that a state keeps are float32 without having been rounded.
        is_rounded = detail != "float32" and float((change(numbers) - numbers).abs().max()) < 1e-12
        if is_rounded and error <= 10 * step:
            return SegmentBug(ROUNDED, f"to {detail}")
    return None
