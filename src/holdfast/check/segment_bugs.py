"""Known bugs of how a segment is read: what it may start from, which flags it may apply, where it may be cut."""

from collections.abc import Iterator
from itertools import permutations

import torch

from holdfast.check.compare import State, broadcast, state_leaves, with_leaves
from holdfast.check.known_bugs import ResetRule
from holdfast.check.policy_copy import HORIZON, STEPS, PolicyCopy
from holdfast.types import Bool, Tensor

ROUNDED, SWAPPED = "entry state is rounded", "parts of the entry state are swapped"
SHIFTED = "entry state is shifted by one"
PART_LOST = "part of the entry state is lost"
LAST_IGNORED = "a segment's last flag is ignored"
TWO_LATE, TWO_EARLY = "state reset two steps late", "state reset two steps early"
ROLLED = "a segment's flags are rolled by one step"
OTHER_ROWS, INVERTED = "state reset by the flags of other rows", "flags are inverted"


def flag_rules(clear: Bool[Tensor, "A N1"]) -> Iterator[ResetRule]:
    """List ways to misread the flags of segments that are replayed one by one."""
    right, offset = clear[:, :STEPS], torch.arange(STEPS) % HORIZON
    by_segment = right.unflatten(1, (-1, HORIZON))
    yield ResetRule(LAST_IGNORED, right & (offset != HORIZON - 1))
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


def entry_rules(policy: PolicyCopy, right: State, zeros: State) -> Iterator[tuple[str, State]]:
    """List what segments may start from instead of the right entry states."""
    leaves, axes = state_leaves(right), policy.rows.axes
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8):
        floating = [leaf.to(dtype).to(leaf.dtype) if leaf.is_floating_point() else leaf for leaf in leaves]
        yield f"{ROUNDED} to {str(dtype).removeprefix('torch.')}", with_leaves(right, floating)
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
