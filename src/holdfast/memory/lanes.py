"""Lanes: rows that start often give what follows a start to rows that start seldom, and get less for it.

What comes after a start knows nothing of what came before it. So every row may be cut at a start, and the
longest head be followed by the shortest tail, whoever it is of: no other way makes the longest lane
shorter. Rows cut near their middle have heads and tails of all lengths, which fit best.

A gradient that is NaN goes through a shut gate (0 x NaN is NaN), and so to the row before it in its lane;
the gradients of the weights are NaN then in any case.
"""

from typing import NamedTuple

import torch

from holdfast.shapes import Bool, Int, Tensor

FEWEST = 32
"""Among fewer rows hardly a slot is saved, and planning costs more than that."""


class Lanes(NamedTuple):
    """Where each step of a batch of rows is computed."""

    longest: int
    """Slots of the longest lane, at least 1."""
    total_B: Int[Tensor, " B"]
    """Slots of each lane."""
    lane_BT: Int[Tensor, "B T"]
    """The lane of each step."""
    end_BT: Int[Tensor, "B T"]
    """Slots of that lane, up to each step and with it."""


def exchange_tails(
    start_BT: Bool[Tensor, "B T"], valid_BT: Bool[Tensor, "B T"], end_BT: Int[Tensor, "B T"]
) -> Lanes:
    """Lay rows into as many lanes, each beginning in its own; `end_BT` counts the slots of each row.

    Where that would not make the longest shorter, and among few rows, each stays in its own to its end.
    """
    B, T = start_BT.shape
    total_B = end_BT[:, -1]
    row_B, step_T = (torch.arange(size, device=end_BT.device) for size in (B, T))
    own = Lanes(max(1, int(total_B.max())), total_B, row_B[:, None].expand(B, T), end_BT)
    if B < FEWEST:
        return own
    nearness_BT = torch.where(start_BT, T - (step_T - T // 2).abs(), 0)
    nearness_B, cut_B = nearness_BT.max(1)
    starts_B = nearness_B > 0
    tail_BT = starts_B[:, None] & (step_T >= cut_B[:, None])
    before_BT = end_BT - valid_BT.long() - 1
    head_B = torch.where(starts_B, before_BT.gather(1, cut_B[:, None])[:, 0], total_B)
    # Rows without a start come first in both orders, one after the other: they keep their lane.
    longest_first = torch.where(starts_B, -head_B, -total_B.new_tensor(3 * T)).argsort(stable=True)
    shortest_first = torch.where(starts_B, total_B - head_B, -1).argsort(stable=True)
    lane_B = torch.empty_like(row_B).scatter_(0, shortest_first, longest_first)
    shift_B = head_B[lane_B] - head_B
    new_B = torch.empty_like(total_B).scatter_(0, lane_B, total_B + shift_B)
    longest = max(1, int(new_B.max()))
    if longest >= own.longest:
        return own
    return Lanes(
        longest,
        new_B,
        torch.where(tail_BT, lane_B[:, None], row_B[:, None]),
        torch.where(tail_BT, end_BT + shift_B[:, None], end_BT),
    )
