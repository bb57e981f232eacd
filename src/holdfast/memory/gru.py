"""The GRU cell: any number of layers, clears at any step, no loop over time."""

from typing import final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory import reference
from holdfast.memory.slots import SHUT, Slots
from holdfast.memory.stack import Stack
from holdfast.shapes import Tensor


def _squash(state: TensorDict) -> Tensor:
    """All of it: a mean of hyperbolic tangents."""
    return state["h"]


@final
class GRU(Stack):
    """A stack of GRU layers as a pure cell; its state is `{"h": [B,L,H]}`.

    Weights are orthogonal, biases 0. Clears inside a segment are blank slots, as in the LSTM: update
    and reset gates are driven shut and the candidate gets no bias, so that the state that leaves a
    blank is exactly zero.
    """

    leaves = ("h",)
    plain_layer = staticmethod(reference.gru_layer)
    squash = staticmethod(_squash)

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        # The drives are those of the gates r z n.
        drive = [[SHUT, SHUT], [SHUT, -SHUT], [0.0, 0.0]]
        super().__init__(nn.GRU(input_size, hidden_size, num_layers), drive)

    def _call(
        self, x_TBD: Tensor, before: list[Tensor], weights: list[Tensor], layers: int
    ) -> tuple[Tensor, ...]:
        (h_LBH,) = before
        return torch.gru(x_TBD, h_LBH, weights, True, layers, 0.0, self.training, False, False)

    def _flags(self, slots: Slots) -> Tensor:
        return torch.cat([slots.drive_SB2, 1 - slots.drive_SB2.sum(-1, keepdim=True)], dim=-1)

    def _layer_in_slots(
        self, number: int, x_SBD: Tensor, before: list[Tensor], slots: Slots
    ) -> tuple[Tensor, ...]:
        """Run one layer; what comes out of blanks and holds is made zero here, as it is not by itself."""
        weight_ih, weight_hh, bias_ih, bias_hh = self.layer(number)
        gates, candidate = bias_ih.split([2 * self.hidden_size, self.hidden_size])
        # The candidate's bias comes with real steps only: in blanks and holds it is exactly 0, and so is
        # what they add to its gradient; n + z (h - n) is then exactly 0 and exactly h.
        column = torch.cat([torch.zeros_like(gates), candidate])[:, None]
        bias = torch.cat([gates, torch.zeros_like(candidate)])
        weights = [torch.cat([weight_ih, self._drive, column], dim=1), weight_hh, bias, bias_hh]
        y_SBH, h_1BH = self._call(x_SBD, [before[0][None].contiguous()], weights, 1)
        # The next layer's own drives shall be all it reads in blanks and holds.
        return torch.where(x_SBD[:, :, -1:] > 0, y_SBH, 0.0), h_1BH[0][slots.lane_B]
