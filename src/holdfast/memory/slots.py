"""Where each step of a segment goes when rows get a blank slot before every start.

A dense LSTM call cannot forget in the middle of a row. A blank slot whose gates are driven shut
makes it: the state that leaves the blank is exactly zero. Steps nobody acts in get no slot, so memory
stands still there. Lanes that need fewer slots than the longest end in holds, which keep the cell.

Row by row, the one with the most starts would decide how long all have to be. What comes after a start
knows nothing of what came before it, though, and may follow whatever else: see lanes.py.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from holdfast.memory.lanes import exchange_tails
from holdfast.shapes import Bool, Float, Int, Tensor

SHUT = -1e4
"""A gate driven this far is exactly 0 in every float type, and +1e4 exactly 1."""


class Rows(NamedTuple):
    """Which row each row is taken from."""

    source: Int[Tensor, " N"]
    none: Int[Tensor, " K"]
    """Rows that are taken from nowhere: they become zeros."""


@dataclass(frozen=True)
class Slots:
    """A plan for one batch of segments; every layer of a cell uses the same one."""

    length: int
    """Slots of the longest lane."""
    step_of: Rows
    """The step in each slot, flat: slot * B + lane is taken from row * T + step."""
    slot_of: Rows
    """The slot of each step, flat the other way round."""
    lane_B: Int[Tensor, " B"]
    """The lane each row ends in; every row begins in its own."""
    last_B: Int[Tensor, " B"]
    """The flat slot each row ends in, blank or step."""
    empty_B: Bool[Tensor, " B"]
    """Rows without any slot."""
    drive_SB2: Float[Tensor, "S B 2"]
    """Two flags a slot: blank (forget everything), hold (keep the cell)."""

    def spread(
        self, x_BTD: Float[Tensor, "B T D"], flags_SBF: Float[Tensor, "S B F"]
    ) -> Float[Tensor, "S B D+F"]:
        """Lay the steps into their slots, with zeros in all others, and flags beside them."""
        flat = _Spread.apply(x_BTD.flatten(0, 1), flags_SBF.flatten(0, 1), self.step_of, self.slot_of)
        return flat.unflatten(0, (self.length, len(x_BTD)))

    def collect(self, y_SBH: Float[Tensor, "S B H"]) -> Float[Tensor, "B T H"]:
        """Take each step's output from its slot; steps without one get zeros."""
        flat = _Taken.apply(y_SBH.flatten(0, 1), self.slot_of, self.step_of)
        return flat.unflatten(0, (y_SBH.shape[1], -1))


def plan_slots(clear_BT: Bool[Tensor, "B T"], valid_BT: Bool[Tensor, "B T"], dtype: torch.dtype) -> Slots:
    """Give every step that is read a slot, and a blank one before it where it opens an episode.

    A clear at step 0 needs no blank: the caller empties the entry state.
    """
    B, T = clear_BT.shape
    blank_BT = clear_BT.clone()
    blank_BT[:, 0] = False
    end_BT = torch.cumsum(blank_BT.long() + valid_BT, dim=1)
    lanes = exchange_tails(blank_BT, valid_BT, end_BT)
    nowhere = lanes.longest * B
    place_BT = torch.where(valid_BT, (lanes.end_BT - 1) * B + lanes.lane_BT, nowhere)
    step_of = torch.full((nowhere + 1,), -1, device=clear_BT.device)
    step_of[place_BT.flatten()] = torch.arange(B * T, device=clear_BT.device)
    idle_SB = (step_of[:-1] < 0).unflatten(0, (lanes.longest, B))
    hold_SB = torch.arange(lanes.longest, device=clear_BT.device)[:, None] >= lanes.total_B
    lane_B, away = lanes.lane_BT[:, -1], valid_BT.logical_not().flatten()
    return Slots(
        length=lanes.longest,
        step_of=Rows(step_of[:-1].clamp(min=0), idle_SB.flatten().nonzero().flatten()),
        slot_of=Rows(place_BT.flatten().clamp(max=nowhere - 1), away.nonzero().flatten()),
        lane_B=lane_B,
        last_B=(lanes.total_B[lane_B] - 1).clamp(min=0) * B + lane_B,
        empty_B=end_BT[:, -1] == 0,
        drive_SB2=torch.stack([idle_SB & ~hold_SB, hold_SB], dim=-1).to(dtype),
    )


# Both ways rows are gathered, each from where the plan says: scattering them costs several times as much.


class _Taken(torch.autograd.Function):
    """Rows in another order; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, there: Rows, back: Rows) -> Tensor:
        ctx.way = there, back
        return x_ND.index_select(0, there.source).index_fill_(0, there.none, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        there, back = ctx.way
        return _Taken.apply(grads[0], back, there), None, None


class _Spread(torch.autograd.Function):
    """The same, with flags beside each row: written into one piece of memory."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, flags_MF: Tensor, there: Rows, back: Rows) -> Tensor:
        ctx.way, D = (there, back), x_ND.shape[1]
        both = x_ND.new_empty(len(flags_MF), D + flags_MF.shape[1])
        both[:, D:] = flags_MF
        torch.index_select(x_ND, 0, there.source, out=both[:, :D])
        both[:, :D].index_fill_(0, there.none, 0.0)
        ctx.size = D
        return both

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        there, back = ctx.way
        return _Taken.apply(grads[0][:, : ctx.size], back, there), None, None, None
