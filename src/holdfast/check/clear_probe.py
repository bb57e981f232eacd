"""What an episode start does to each number of a state, and whose flags do it: found by moving one number at a time."""

from dataclasses import dataclass, replace

import torch

from holdfast.check.adapters.base import flat
from holdfast.check.compare import State, clone_state, has_plain_numbers, named_leaves, state_leaves, with_leaves
from holdfast.check.policy_copy import HORIZON, PolicyCopy
from holdfast.check.script import Script, StepBatch
from holdfast.rng import isolated_rng
from holdfast.types import Bool, Float, Tensor

MOVE = 0.05
LATER = 6
"""Steps whose outputs may show a moved number: what is kept and never read does no harm."""
MAX_NUMBERS = 512
"""Numbers of a state that are moved; of larger states an even sample."""
GONE, SURVIVES = 1e-6, 1e-3
"""Shares of an effect below which it is gone, and within which it is all there."""

PART, SOFT, TWO_STARTS = "only part of the state is reset", "soft reset", "two different initial states"
NEVER, INVERTED = "state never reset", "flags are inverted"
OTHER_ROWS = "state reset by the flags of other rows"
ANY, FIRST_ROW = "one episode start resets all rows", "the first row's flags reset all rows"
AFTER = "state reset after the step has read"
SOME_ROWS = "flags of some rows are ignored"
TOGETHER = "state reset only when all rows start together"
MIXED, NO_TENSOR = "rows of a batch mix", "something in the state that is no tensor"


@dataclass(frozen=True)
class Clearing:
    """The bug of how a single step clears, and what is measurable of it."""

    name: str
    detail: str = ""


@torch.no_grad()
def clearing_bug(policy: PolicyCopy, script: Script) -> Clearing | None:
    """Find out what the flags of one step clear; None if that is right, or not any known bug."""
    with policy.default_dtype(), isolated_rng(0):
        _, states = policy.steps(script.without_flags(), stop=HORIZON)
        state, inputs = states[-1], policy.to_policy(script)
        step = inputs.at(HORIZON)
        rows = _wrong_rows(policy, step, state)
        if rows is not None:
            return rows
        surviving, numbers = _moved_effects(policy, inputs, state)
        if surviving is None:
            return _other_start(policy, step, state)
        on, off = surviving
        # A number whose effect is tiny tells nothing.
        measurable = off > 1e-9 * off.max()
        share = torch.where(measurable, on / off.clamp(min=1e-30), 0.0)[measurable]
        if bool((share < GONE).all()):
            return _other_start(policy, step, state)
        chosen = [number for number, is_measurable in zip(numbers, measurable.tolist(), strict=True) if is_measurable]
        return _name_share(share, chosen, all_floating=all(leaf.is_floating_point() for leaf in state_leaves(state)))


def _name_share(share: Float[Tensor, " N"], numbers: list[tuple[str, ...]], *, all_floating: bool) -> Clearing | None:
    gone = share < GONE
    if not bool(gone.any()):
        middle = float(share.median())
        if bool(((share - 1).abs() < SURVIVES).all()):
            return Clearing(NEVER)
        # Effects are not linear in the state, so shares differ a little.
        if middle < 1 and all_floating and bool(((share > middle / 3) & (share < middle * 3)).all()):
            return Clearing(SOFT, f"a share of {middle:.2g} of it stays")
        return None
    surviving = [number for number, is_gone in zip(numbers, gone.tolist(), strict=True) if not is_gone]
    return Clearing(PART, _where(surviving, numbers))


def _where(surviving: list[tuple[str, ...]], numbers: list[tuple[str, ...]]) -> str:
    """Say which numbers stay, by the axes that tell them from the others."""
    words = []
    for axis, what in enumerate(("", "index", "unit")):
        values = {number[axis] for number in surviving if len(number) > axis}
        if values and values < {number[axis] for number in numbers if len(number) > axis}:
            listed = sorted(values, key=lambda word: (len(word), word))
            shown = ", ".join(listed[:4]) + (" and others" if len(listed) > 4 else "")
            words.append(f"{what} {shown}".strip())
    return f"{len(surviving)} of {len(numbers)} numbers stay{': ' + ', '.join(words) if words else ''}"


def _moved_effects(
    policy: PolicyCopy, inputs: Script, state: State
) -> tuple[tuple[Float[Tensor, " N"], Float[Tensor, " N"]] | None, list[tuple[str, ...]]]:
    """Move each number of a state; return the effects on the next outputs with a flag and without, and its position."""
    axes, moved, numbers = policy.rows.axes, list[State](), list[tuple[str, ...]]()
    base = policy.rows.pick(state, torch.tensor([0]))
    leaves, names = state_leaves(base), list(named_leaves(state))
    every = -(-sum(leaf.numel() for leaf in leaves) // MAX_NUMBERS)
    for number, (leaf, axis) in enumerate(zip(leaves, axes, strict=True)):
        for index in range(number % every, leaf.numel(), every):
            changed = [part.clone() for part in leaves]
            _move(changed[number].view(-1)[index : index + 1])
            moved.append(with_leaves(base, changed))
            at = [str(int(i)) for i in torch.unravel_index(torch.tensor(index), leaf.shape)]
            numbers.append((names[number], *(i for place, i in enumerate(at) if place != axis)))
    if not moved:
        return None, []
    batch, row = policy.rows.cat([base, *moved]), torch.zeros(len(moved) + 1, dtype=torch.long)
    effects = []
    for flag in (True, False):
        after, change = clone_state(batch), list[Tensor]()
        for t in range(HORIZON, HORIZON + LATER):
            step = inputs.at(t)[row]
            flags = torch.full_like(step.first, flag and t == HORIZON)
            outputs, after = policy.adapter.act(step.with_starts(flags), after)
            change.append((flat(outputs, 1)[1:] - flat(outputs, 1)[:1]).double())
        effects.append(torch.cat(change, 1).norm(dim=1).cpu())
    return (effects[0], effects[1]), numbers


def _move(number: Tensor) -> None:
    if number.dtype == torch.bool:
        number.logical_not_()
    elif number.is_floating_point():
        number.add_(MOVE)
    else:
        number.add_(1)


def _wrong_rows(policy: PolicyCopy, step: StepBatch, state: State) -> Clearing | None:
    """Set one row's flag at a time, and see which rows it changes."""
    rows = len(step.first)
    never, always = (_all(policy, step, state, torch.full_like(step.first, flag)) for flag in (False, True))
    matters = (never - always).abs().amax(1) > 0
    reach = torch.zeros(rows, rows, dtype=torch.bool)
    for row in range(rows):
        flags = torch.zeros_like(step.first)
        flags[row] = True
        reach[row] = (_all(policy, step, state, flags) - never).abs().amax(1) > 0
    if not bool(matters.any()):
        return Clearing(MIXED, "flags that are set together do nothing") if bool(reach.any()) else Clearing(NEVER)
    own = torch.eye(rows, dtype=torch.bool)
    if reach.equal(own & matters):
        return _inverted(policy, step, state)
    if not bool(reach.any()):
        return Clearing(TOGETHER)
    if not bool((reach & ~own).any()):
        ignored = (matters & ~reach.diagonal()).nonzero().flatten().tolist()
        return Clearing(SOME_ROWS, f"those of rows {', '.join(map(str, ignored))}")
    if bool(reach.all()):
        return Clearing(ANY)
    if bool(reach[0].sum() >= rows - 1) and not bool(reach[1:].any()):
        return Clearing(FIRST_ROW)
    if bool((reach.sum(1) <= 1).all()) and bool((reach & ~own).any()):
        return Clearing(OTHER_ROWS, _shift(reach))
    return None


def _shift(reach: Bool[Tensor, "A A"]) -> str:
    source, target = reach.nonzero().unbind(1)
    shifts = set(((target - source) % len(reach)).tolist())
    if shifts == {1}:
        return "each row by the flag of the row before it"
    if shifts == {len(reach) - 1}:
        return "each row by the flag of the row after it"
    return f"row {int(target[0])} by the flag of row {int(source[0])}"


def _inverted(policy: PolicyCopy, step: StepBatch, state: State) -> Clearing | None:
    """Whether the state has no effect without a flag, and one with it."""
    depends = []
    other = policy.rows.pick(state, torch.arange(len(step.first)).roll(1))
    for flag in (False, True):
        flags = torch.full_like(step.first, flag)
        depends.append(not _all(policy, step, state, flags).equal(_all(policy, step, other, flags)))
    return Clearing(INVERTED) if depends == [False, True] else None


def _other_start(policy: PolicyCopy, step: StepBatch, state: State) -> Clearing | None:
    """Whether a start gives something else than the initial state does."""
    flags = torch.ones_like(step.first)
    cleared = _all(policy, step, state, flags)
    other_obs = replace(step, obs=step.obs.roll(1, 0))
    if not _all(policy, step, state, ~flags).equal(_all(policy, other_obs, state, ~flags)) and cleared.equal(
        _all(policy, other_obs, state, flags)
    ):
        return Clearing(AFTER)
    never = step.with_starts(~flags)
    initial = _all(policy, step, policy.adapter.initial(len(flags)), ~flags)
    if not torch.allclose(initial, cleared, atol=1e-9):
        if remaining := _remaining_tensor(policy, step, state, initial):
            return Clearing(PART, f"{remaining} stays")
        if has_plain_numbers(state):
            return Clearing(NO_TENSOR)
    from_none = policy.adapter.act_from_none(never)
    if from_none is not None and not torch.allclose(flat(from_none, 1).cpu(), cleared, atol=1e-9):
        return Clearing(TWO_STARTS, "None gives one, an episode start another")
    if from_none is None and not torch.allclose(initial, cleared, atol=1e-9):
        return Clearing(TWO_STARTS, "the first rollout has one, an episode start another")
    return None


def _remaining_tensor(policy: PolicyCopy, step: StepBatch, state: State, initial: Float[Tensor, "A K"]) -> str:
    """Name the one tensor of the state that a start does not clear; "" if there is none."""
    flags, starts = torch.ones_like(step.first), state_leaves(policy.adapter.initial(len(step.first)))
    for number, name in enumerate(named_leaves(state)):
        leaves = state_leaves(clone_state(state))
        leaves[number] = starts[number]
        if torch.allclose(_all(policy, step, with_leaves(state, leaves), flags), initial, atol=1e-9):
            return name
    return ""


def _all(policy: PolicyCopy, step: StepBatch, state: State, flags: Bool[Tensor, " A"]) -> Float[Tensor, "A K"]:
    outputs, _ = policy.adapter.act(step.with_starts(flags), clone_state(state))
    return flat(outputs, 1).cpu()
