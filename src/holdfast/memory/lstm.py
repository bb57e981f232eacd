"""The LSTM cell: any number of layers, clears at any step, no loop over time."""

from typing import Literal, final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory import reference
from holdfast.memory.slots import SHUT, Slots
from holdfast.memory.stack import Stack
from holdfast.shapes import Tensor

MemoryInit = Literal["standard", "original"]


def _squash(state: TensorDict) -> Tensor:
    """What is said of a cell is its hyperbolic tangent: a cell far out says the same whatever is added."""
    return state["c"].tanh()


@final
class LSTM(Stack):
    """A stack of LSTM layers as a pure cell; its state is `{"h": [B,L,H], "c": [B,L,H]}`.

    Weights are orthogonal, the forget gate's bias is 1 and the others 0. `init="original"` sets all
    biases to 1 as the original system did; that saturates the cell and slows or stops learning.
    """

    leaves = ("h", "c")
    plain_layer = staticmethod(reference.lstm_layer)
    squash = staticmethod(_squash)

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        init: MemoryInit = "standard",
    ) -> None:
        # The drives are those of the gates i f g o.
        drive = [[SHUT, SHUT], [SHUT, -SHUT], [0.0, 0.0], [SHUT, SHUT]]
        super().__init__(nn.LSTM(input_size, hidden_size, num_layers), drive)
        with torch.no_grad():
            for number in range(num_layers):
                _, _, bias_ih, bias_hh = self.layer(number)
                if init == "original":
                    nn.init.ones_(bias_ih)
                    nn.init.ones_(bias_hh)
                else:
                    bias_ih[hidden_size : 2 * hidden_size] = 1.0

    def _call(
        self, x_TBD: Tensor, before: list[Tensor], weights: list[Tensor], layers: int
    ) -> tuple[Tensor, ...]:
        return torch.lstm(x_TBD, before, weights, True, layers, 0.0, self.training, False, False)

    def _flags(self, slots: Slots) -> Tensor:
        return slots.drive_SB2

    def _layer_in_slots(
        self, number: int, x_SBD: Tensor, before: list[Tensor], slots: Slots
    ) -> tuple[Tensor, ...]:
        """Run one layer: its shut output gate makes zeros of blanks and holds, so h is of the last slot."""
        weight_ih, *others = self.layer(number)
        weights = [torch.cat([weight_ih, self._drive], dim=1), *others]
        y_SBH, _, c_1BH = self._call(
            x_SBD,
            [leaf_BH[None].contiguous() for leaf_BH in before],
            _in_one_chunk(weights) if x_SBD.is_cuda else weights,
            1,
        )
        h_BH = torch.where(slots.empty_B[:, None], before[0], y_SBH.flatten(0, 1)[slots.last_B])
        return y_SBH, h_BH, c_1BH[0][slots.lane_B]


def _in_one_chunk(weights: list[Tensor]) -> list[Tensor]:
    """Lay weights end to end in one piece of memory, as cuDNN wants them; it warns if they are not."""
    flat = torch.cat([weight.flatten() for weight in weights])
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]
