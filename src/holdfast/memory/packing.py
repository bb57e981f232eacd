"""Packing: segments with resets inside as one dense call, the CPU path.

A reset becomes a slot of its own before the step that starts the episode: its gates are closed, so the state that
leaves it is zero. Shorter packed rows end in padding slots, which keep their state.
"""

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from holdfast.types import Bool, Float, Int, Tensor

MIN_ROWS = 32
"""With fewer rows, balancing saves fewer slots than it costs."""


class RowBalance(NamedTuple):
    """The packed row and slot of each step."""

    longest: int
    """Slots of the longest packed row, at least 1."""
    total_B: np.ndarray
    """Slots of each packed row."""
    row_BT: np.ndarray
    """The packed row of each step."""
    end_BT: np.ndarray
    """Slots of that packed row up to and including each step."""


def balance_rows(start_BT: np.ndarray, valid_BT: np.ndarray, end_BT: np.ndarray) -> RowBalance:
    """Move the episodes after a reset from rows with many resets to rows with few.

    `end_BT` counts the slots of each row. Rows stay as they are if there are few of them, or if moving
    does not shorten the longest.
    """
    B, T = start_BT.shape
    total_B, row_B, step_T = end_BT[:, -1], np.arange(B), np.arange(T)
    unmoved = RowBalance(max(1, int(total_B.max())), total_B, np.broadcast_to(row_B[:, None], (B, T)), end_BT)
    if B < MIN_ROWS:
        return unmoved
    # Each row is cut at the start nearest to its middle.
    nearness_BT = np.where(start_BT, T - abs(step_T - T // 2), 0)
    cut_B = nearness_BT.argmax(1)
    starts_B = nearness_BT[row_B, cut_B] > 0
    tail_BT = starts_B[:, None] & (step_T >= cut_B[:, None])
    before_BT = end_BT - valid_BT - 1
    head_B = np.where(starts_B, before_BT[row_B, cut_B], total_B)
    # Rows without a start come first in both orders, in the same sequence: they are not moved.
    longest_first = np.where(starts_B, -head_B, -3 * T).argsort(kind="stable")
    shortest_first = np.where(starts_B, total_B - head_B, -1).argsort(kind="stable")
    new_row_B, new_total_B = np.empty_like(row_B), np.empty_like(total_B)
    new_row_B[shortest_first] = longest_first
    shift_B = head_B[new_row_B] - head_B
    new_total_B[new_row_B] = total_B + shift_B
    longest = max(1, int(new_total_B.max()))
    if longest >= unmoved.longest:
        return unmoved
    return RowBalance(
        longest,
        new_total_B,
        np.where(tail_BT, new_row_B[:, None], row_B[:, None]),
        np.where(tail_BT, end_BT + shift_B[:, None], end_BT),
    )


class RowIndex(NamedTuple):
    """Source row of each output row."""

    source: Int[Tensor, " N"]
    zeros: Int[Tensor, " K"]
    """Output rows without a source: they are filled with zeros."""


@dataclass(frozen=True)
class PackingPlan:
    """Packing of one batch of segments, shared by all layers of a cell."""

    length: int
    """Slots of the longest packed row."""
    step_of: RowIndex
    """The step in each slot: flat slot * B + packed row, from row * T + step."""
    slot_of: RowIndex
    """The slot of each step: the inverse."""
    row_B: Int[Tensor, " B"]
    """The packed row that each row ends in; each starts in its own."""
    last_B: Int[Tensor, " B"]
    """The flat slot that each row ends in."""
    empty_B: Bool[Tensor, " B"]
    """Rows without any slot."""
    flags_SB3: Float[Tensor, "S B 3"]
    """Flags of each slot: reset (clear the state), padding (keep the state), step."""

    def pack(self, x_BTD: Float[Tensor, "B T D"], flags_SBF: Float[Tensor, "S B F"]) -> Float[Tensor, "S B D+F"]:
        """Copy steps into their slots, zeros into the others, and append the flags."""
        flat = _GatherRows.apply(x_BTD.flatten(0, 1), self.step_of, self.slot_of)
        return torch.cat([flat.unflatten(0, (self.length, len(x_BTD))), flags_SBF], dim=-1)

    def unpack(self, y_SBH: Float[Tensor, "S B H"]) -> Float[Tensor, "B T H"]:
        """Return each step's output from its slot; steps without a slot get zeros."""
        flat = _GatherRows.apply(y_SBH.flatten(0, 1), self.slot_of, self.step_of)
        return flat.unflatten(0, (y_SBH.shape[1], -1))


def plan_packing(clear_BT: Bool[Tensor, "B T"], valid_BT: Bool[Tensor, "B T"], dtype: torch.dtype) -> PackingPlan:
    """Assign a slot to every valid step, and a reset slot before each clear inside the segment.

    A clear at step 0 needs none: the caller clears the entry state. Planned by NumPy, which has a third of torch's
    overhead for each of some forty operations.
    """
    (B, T), device = clear_BT.shape, clear_BT.device
    valid, reset = _to_numpy(valid_BT), _to_numpy(clear_BT).copy()
    reset[:, 0] = False
    end = np.cumsum(reset.astype(np.int64) + valid, 1)
    rows = balance_rows(reset, valid, end)
    no_slot = rows.longest * B
    slot = np.where(valid, (rows.end_BT - 1) * B + rows.row_BT, no_slot).ravel()
    step_of = np.full(no_slot + 1, -1)
    step_of[slot] = np.arange(B * T)
    idle = step_of[:-1] < 0
    padding = (np.arange(rows.longest)[:, None] >= rows.total_B).ravel()
    last_row = rows.row_BT[:, -1].copy()

    def to_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device)

    flags = to_device(np.stack([idle & ~padding, padding, ~idle], -1))
    return PackingPlan(
        length=rows.longest,
        step_of=RowIndex(to_device(step_of[:-1].clip(min=0)), to_device(idle.nonzero()[0])),
        slot_of=RowIndex(to_device(slot.clip(max=no_slot - 1)), to_device((~valid).ravel().nonzero()[0])),
        row_B=to_device(last_row),
        last_B=to_device((rows.total_B[last_row] - 1).clip(min=0) * B + last_row),
        empty_B=to_device(end[:, -1] == 0),
        flags_SB3=flags.unflatten(0, (rows.longest, B)).to(dtype),
    )


class _GatherRows(torch.autograd.Function):
    """Gather rows; the gradient gathers by the inverse index, since scattering costs several times as much."""

    # For torch.func.jacrev, which vectorizes the backward pass.
    generate_vmap_rule = True

    @staticmethod
    def forward(x_ND: Tensor, index: RowIndex, inverse: RowIndex) -> Tensor:
        return _gather_rows(x_ND, index)

    # Apart from forward: torch.func needs it so.
    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.indices = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        index, inverse = ctx.indices
        if torch.is_grad_enabled():
            return _GatherRows.apply(grads[0], inverse, index), None, None
        return _gather_rows(grads[0], inverse), None, None


def _gather_rows(x_ND: Tensor, index: RowIndex) -> Tensor:
    rows = x_ND.index_select(0, index.source)
    return rows.index_fill_(0, index.zeros, 0.0) if len(index.zeros) else rows


# Torch looks it up in every call, which takes longer than gathering.
vars(_GatherRows)["forward"].__func__.__signature__ = inspect.signature(_GatherRows.forward)


def _to_numpy(mask: Tensor) -> Any:
    """Return a mask as an array; within `torch.func.grad` tensors are wrapped and have no data of their own."""
    try:
        return mask.numpy(force=True)
    except RuntimeError:
        return np.array(mask.tolist(), dtype=bool)
