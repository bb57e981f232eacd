"""Known bugs of how a segment is read: entry states, flags, observations, chunks and the order of its outputs."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import permutations

import torch

from holdfast.check.compare import State, broadcast, state_leaves, with_leaves
from holdfast.check.known_bugs import ResetRule
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS, PolicyCopy
from holdfast.types import Bool, Float, Tensor

ROUNDED, SWAPPED = "entry state is rounded", "parts of the entry state are swapped"
SHIFTED = "entry state is shifted by one"
PART_LOST = "part of the entry state is lost"
LAST_IGNORED = "a segment's last flag is ignored"
TWO_LATE, TWO_EARLY = "state reset two steps late", "state reset two steps early"
ROLLED = "a segment's flags are rolled by one step"
OTHER_ROWS, INVERTED = "state reset by the flags of other rows", "flags are inverted"
AGAIN = "state reset again one step later"
SCALED = "entry state is scaled"
OTHER_OBS, LATE_OBS = "observations of other rows in updates", "observations of a segment are shifted by one step"
OTHER_OUTPUTS, LATE_OUTPUTS = "outputs of other rows in updates", "outputs of a segment are shifted by one step"
OF_ENTRIES = {"replay starts from zeros", "entry states of other rows", "entry state stored after the step", PART_LOST}
"""Bugs of entry states that may concern some agents only."""


def flag_rules(clear: Bool[Tensor, "A N1"]) -> Iterator[ResetRule]:
    """List ways to misread the flags of segments that are replayed one by one."""
    right, offset = clear[:, :STEPS], torch.arange(STEPS) % HORIZON
    by_segment = right.unflatten(1, (-1, HORIZON))
    yield ResetRule(LAST_IGNORED, right & (offset != HORIZON - 1))
    yield ResetRule(AGAIN, right | (right.roll(1, 1) & (offset != 0)))
    yield ResetRule(ROLLED, by_segment.roll(1, 2).flatten(1))
    yield ResetRule(ROLLED, by_segment.roll(-1, 2).flatten(1))
    for shift, name in ((2, TWO_LATE), (-2, TWO_EARLY)):
        inside = offset >= 2 if shift > 0 else offset < HORIZON - 2
        yield ResetRule(name, right.roll(shift, 1) & inside)
    for order in (right.roll(1, 0), right.roll(-1, 0), right.flip(0)):
        yield ResetRule(OTHER_ROWS, order)
    yield ResetRule("a segment's flags are read backwards", by_segment.flip(2).flatten(1))
    yield ResetRule(INVERTED, ~right)
    for length in range(1, HORIZON):
        yield ResetRule(f"segments are read in chunks of {length} from zeros", right | _edges(offset, length))


def _edges(offset: Tensor, length: int) -> Tensor:
    return (offset % length == 0) & (offset > 0)


def entry_rules(policy: PolicyCopy, right: State, zeros: State) -> Iterator[tuple[str, str, State]]:
    """List what segments may start from instead of the right entry states, by name and detail."""
    for name, state in _rearranged(policy, right, zeros):
        yield name, "", state
    leaves = state_leaves(right)
    for detail, change in roundings():
        yield ROUNDED, f"to {detail}", with_leaves(right, [round_leaf(change, leaf) for leaf in leaves])


def roundings() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """List ways to round numbers, the coarse ones first: to dtypes, decimals, steps, 8 bits of a tensor's range."""
    for dtype in (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32):
        yield str(dtype).removeprefix("torch."), lambda x, dtype=dtype: x.to(dtype).to(x.dtype)
    for digits in range(1, 7):
        yield f"{digits} decimals", lambda x, digits=digits: (x * 10**digits).round() / 10**digits
    for bits in (127, 128, 255):
        yield f"steps of 1/{bits}", lambda x, bits=bits: (x * bits).round() / bits
    yield "8 bits", lambda x: (x / x.abs().max().clamp(min=1e-30) * 127).round() * x.abs().max() / 127


def round_leaf(change: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """Round a tensor of floating-point numbers."""
    return change(leaf) if leaf.is_floating_point() else leaf


def scaled(state: State, scale: float) -> State:
    """Multiply all floating-point numbers of a state."""
    return with_leaves(state, [leaf * scale if leaf.is_floating_point() else leaf for leaf in state_leaves(state)])


def _rearranged(policy: PolicyCopy, right: State, zeros: State) -> Iterator[tuple[str, State]]:
    """List entry states whose parts are exchanged, shifted or lost."""
    leaves, axes = state_leaves(right), policy.rows.axes
    for order in permutations(range(len(leaves))) if 1 < len(leaves) <= 4 else ():
        if list(order) != sorted(order) and all(leaves[i].shape == leaves[n].shape for n, i in enumerate(order)):
            yield SWAPPED, with_leaves(right, [leaves[i] for i in order])
    most = max((leaf.dim() for leaf in leaves), default=0)
    for axis in range(most):
        fits = [leaf.dim() > axis and axis != rows for leaf, rows in zip(leaves, axes, strict=True)]
        if not any(fits):
            continue
        for name, change in ((SWAPPED, torch.flip), (SHIFTED, _later), (SHIFTED, _earlier)):
            parts = [change(leaf, (axis,)) if fit else leaf for leaf, fit in zip(leaves, fits, strict=True)]
            yield name, with_leaves(right, parts)
        size = max(leaf.shape[axis] for leaf, fit in zip(leaves, fits, strict=True) if fit)
        for lost in _index_sets(size):
            yield PART_LOST, _lose(policy, right, zeros, axis, lost)
    for number in range(len(leaves)) if len(leaves) > 2 else ():
        parts = [
            leaf if at == number else zero
            for at, (leaf, zero) in enumerate(zip(leaves, state_leaves(zeros), strict=True))
        ]
        yield PART_LOST, with_leaves(right, parts)


def _later(leaf: Tensor, axes: tuple[int, ...]) -> Tensor:
    return leaf.roll(1, axes[0])


def _earlier(leaf: Tensor, axes: tuple[int, ...]) -> Tensor:
    return leaf.roll(-1, axes[0])


def _index_sets(size: int) -> Iterator[Bool[Tensor, " n"]]:
    """List the indices of an axis that may be lost: one, all but one, a half, every second."""
    at = torch.arange(size)
    if size < 2:
        return
    for one in range(size) if size <= 4 else (0, size - 1):
        yield at == one
        yield at != one
    for half in (at < size // 2, at % 2 == 0):
        yield half
        yield ~half


def _lose(policy: PolicyCopy, right: State, zeros: State, axis: int, lost: Bool[Tensor, " n"]) -> State:
    leaves = []
    for leaf, zero, rows in zip(state_leaves(right), state_leaves(zeros), policy.rows.axes, strict=True):
        fits = leaf.dim() > axis and axis != rows and leaf.shape[axis] == len(lost)
        leaves.append(torch.where(broadcast(lost, axis, leaf), zero, leaf) if fits else leaf)
    return with_leaves(right, leaves)


def _late(x_BT: Tensor) -> Tensor:
    return torch.cat([x_BT[:, :1], x_BT[:, :-1]], dim=1)


def _early(x_BT: Tensor) -> Tensor:
    return torch.cat([x_BT[:, 1:], x_BT[:, -1:]], dim=1)


def _late_after_zeros(x_BT: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(x_BT[:, :1]), x_BT[:, :-1]], dim=1)


def _early_before_zeros(x_BT: Tensor) -> Tensor:
    return torch.cat([x_BT[:, 1:], torch.zeros_like(x_BT[:, -1:])], dim=1)


def _rolled(by: int, axis: int, x_BT: Tensor) -> Tensor:
    return x_BT.roll(by, axis)


def _of_agents(change: Callable[[Tensor], Tensor], x_BT: Tensor) -> Tensor:
    """Change the order of agents inside each segment's batch, `[segments * A, T, ...]`."""
    return change(x_BT.unflatten(0, (-1, AGENTS)).transpose(0, 1)).transpose(0, 1).flatten(0, 1)


def _flipped(x_A: Tensor) -> Tensor:
    return x_A.flip(0)


SHIFTS = (_late, _early, partial(_rolled, 1, 1), partial(_rolled, -1, 1), _late_after_zeros, _early_before_zeros)
ORDERS = (partial(_rolled, 1, 0), partial(_rolled, -1, 0), _flipped)
OBS_CHANGES: list[tuple[str, Callable[[Tensor], Tensor]]] = [
    *((LATE_OBS, change) for change in SHIFTS),
    *((OTHER_OBS, partial(_of_agents, change)) for change in ORDERS),
]


def changed_outputs(outputs: Float[Tensor, "A N K"], columns: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    """List right outputs in a wrong order: all of them, or those of one name."""
    names = list(dict.fromkeys(columns))
    segments = outputs.unflatten(1, (-1, HORIZON)).transpose(0, 1).flatten(0, 1)
    chosen = [torch.ones(len(columns), dtype=torch.bool)] if len(names) > 1 else []
    chosen += [torch.tensor([column == name for column in columns]) for name in names]
    for which in chosen:
        for name, changes in ((LATE_OUTPUTS, SHIFTS), (OTHER_OUTPUTS, ORDERS)):
            for change in changes:
                changed = change(segments) if name == LATE_OUTPUTS else _of_agents(change, segments)
                reordered = changed.unflatten(0, (-1, AGENTS)).transpose(0, 1).flatten(1, 2)
                yield name, torch.where(which, reordered, outputs)
