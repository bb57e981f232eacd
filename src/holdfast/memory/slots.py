"""Where each step of a segment goes when rows get a blank slot before every start.

A dense LSTM call cannot forget in the middle of a row. A blank slot whose gates are driven shut
makes it: the state that leaves the blank is exactly zero. Steps nobody acts in get no slot, so memory
stands still there. Rows that need fewer slots than the longest end in holds, which keep the cell.
"""

from dataclasses import dataclass

import torch

from holdfast.shapes import Bool, Float, Int, Tensor

SHUT = -1e4
"""A gate driven this far is exactly 0 in every float type, and +1e4 exactly 1."""


@dataclass(frozen=True)
class Slots:
    """A plan for one batch of segments; every layer of a cell uses the same one."""

    length: int
    """Slots of the longest row."""
    place_BT: Int[Tensor, "B T"]
    """The slot of each step, time-major flat: slot * B + row; one past the end if it has none."""
    last_B: Int[Tensor, " B"]
    """The flat slot each row ends in, blank or step."""
    empty_B: Bool[Tensor, " B"]
    """Rows without any slot."""
    drive_SB2: Float[Tensor, "S B 2"]
    """Two flags a slot: blank (forget everything), hold (keep the cell)."""

    def spread(self, x_BTD: Float[Tensor, "B T D"]) -> Float[Tensor, "S B D"]:
        """Lay the steps into their slots, with zeros in all others."""
        B, _, D = x_BTD.shape
        flat = x_BTD.new_zeros(self.length * B + 1, D)
        flat = flat.index_copy(0, self.place_BT.flatten(), x_BTD.flatten(0, 1))
        return flat[:-1].unflatten(0, (self.length, B))

    def collect(self, y_SBH: Float[Tensor, "S B H"]) -> Float[Tensor, "B T H"]:
        """Take each step's output from its slot; steps without one get zeros."""
        flat = torch.cat([y_SBH.flatten(0, 1), y_SBH.new_zeros(1, y_SBH.shape[-1])])
        return flat.index_select(0, self.place_BT.flatten()).unflatten(0, self.place_BT.shape)


def plan_slots(clear_BT: Bool[Tensor, "B T"], valid_BT: Bool[Tensor, "B T"], dtype: torch.dtype) -> Slots:
    """Give every step that is read a slot, and a blank one before it where it opens an episode.

    A clear at step 0 needs no blank: the caller empties the entry state.
    """
    B, _ = clear_BT.shape
    row_B = torch.arange(B, device=clear_BT.device)
    blank_BT = clear_BT.clone()
    blank_BT[:, 0] = False
    end_BT = torch.cumsum(blank_BT.long() + valid_BT.long(), dim=1)
    total_B = end_BT[:, -1]
    length = max(1, int(total_B.max()))
    nowhere = torch.full_like(end_BT, length * B)
    step_BT = torch.where(valid_BT, (end_BT - 1) * B + row_B[:, None], nowhere)
    before_BT = torch.where(blank_BT, (end_BT - 1 - valid_BT.long()) * B + row_B[:, None], nowhere)
    blank = torch.zeros(length * B + 1, dtype=dtype, device=clear_BT.device)
    blank[before_BT.flatten()] = 1.0
    hold_SB = torch.arange(length, device=clear_BT.device)[:, None] >= total_B[None, :]
    blank_SB = blank[:-1].unflatten(0, (length, B))
    return Slots(
        length=length,
        place_BT=step_BT,
        last_B=(total_B - 1).clamp(min=0) * B + row_B,
        empty_B=total_B == 0,
        drive_SB2=torch.stack([blank_SB, hold_SB.to(dtype)], dim=-1),
    )
