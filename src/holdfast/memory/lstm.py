"""The LSTM cell: any number of layers, clears at any step, no loop over time."""

from collections.abc import Iterable
from typing import Literal, final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory import reference
from holdfast.memory.cell import Cell, select_rows
from holdfast.memory.slots import Slots, plan_slots
from holdfast.shapes import Bool, Float, Tensor

MemoryInit = Literal["standard", "original"]

SHUT = -1e4
"""A gate driven this far is exactly 0 in every float type, and +1e4 exactly 1."""


@final
class LSTM(Cell):
    """A stack of LSTM layers as a pure cell; its state is `{"h": [B,L,H], "c": [B,L,H]}`.

    Weights are orthogonal, the forget gate's bias is 1 and the others 0. `init="original"` sets all
    biases to 1 as the original system did; that saturates the cell and slows or stops learning.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        init: MemoryInit = "standard",
    ) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, hidden_size
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.rnn = nn.LSTM(input_size, hidden_size, num_layers)
        with torch.no_grad():
            for name, weight in self.rnn.named_parameters():
                if name.startswith("weight"):
                    nn.init.orthogonal_(weight)
                elif init == "original":
                    nn.init.ones_(weight)
                else:
                    nn.init.zeros_(weight)
                    if name.startswith("bias_ih"):
                        weight[hidden_size : 2 * hidden_size] = 1.0
        # The drives of a blank slot and of a hold, on the gates i f g o: see slots.py.
        drive = torch.tensor([[SHUT, SHUT], [SHUT, -SHUT], [0.0, 0.0], [SHUT, SHUT]])
        self.register_buffer("_drive", drive.repeat_interleave(hidden_size, 0), persistent=False)
        self._drive: Tensor

    def initial(self, batch: int) -> TensorDict:
        """Make the state of `batch` agents that remember nothing yet: zeros."""
        weight, *_ = self.layer(0)
        zeros = weight.new_zeros(batch, self.num_layers, self.hidden_size)
        return TensorDict({"h": zeros, "c": zeros.clone()}, batch_size=[batch])

    def forward(
        self,
        x: Float[Tensor, "B *T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B *T"],
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> tuple[Float[Tensor, "B *T H"], TensorDict]:
        """Read one step `[B,D]` or one segment `[B,T,D]`."""
        first = clear if x.dim() == 2 else clear[:, 0]
        entry = select_rows(first, self.initial(len(x)), state)
        if x.dim() == 2:
            return self._step(x, entry, valid)
        if valid is None and not clear[:, 1:].any():
            return self._dense(x, entry)
        return self._cleared(x, entry, clear, torch.ones_like(clear) if valid is None else valid)

    def layer(self, number: int) -> reference.LayerWeights:
        """Return one layer's weights."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        a, b, c, d = (getattr(self.rnn, f"{name}_l{number}") for name in names)
        return a, b, c, d

    def _step(self, x_BD: Tensor, entry: TensorDict, valid: Tensor | None) -> tuple[Tensor, TensorDict]:
        h, c, y = [], [], x_BD
        for number in range(self.num_layers):
            before = (entry["h"][:, number], entry["c"][:, number])
            y, cell = torch.lstm_cell(y, before, *self.layer(number))
            h.append(y)
            c.append(cell)
        after = self._state(h, c)
        if valid is None:
            return y, after
        return torch.where(valid[:, None], y, 0.0), select_rows(valid, after, entry)

    def _dense(self, x_BTD: Tensor, entry: TensorDict) -> tuple[Tensor, TensorDict]:
        h_LBH, c_LBH = (entry[key].transpose(0, 1).contiguous() for key in ("h", "c"))
        y_TBH, (h_LBH, c_LBH) = self.rnn(x_BTD.transpose(0, 1), (h_LBH, c_LBH))
        return y_TBH.transpose(0, 1), self._state(h_LBH.unbind(), c_LBH.unbind())

    def _cleared(
        self, x_BTD: Tensor, entry: TensorDict, clear_BT: Tensor, valid_BT: Tensor
    ) -> tuple[Tensor, TensorDict]:
        slots = plan_slots(clear_BT, valid_BT, x_BTD.dtype)
        h, c, y_BTH = [], [], x_BTD
        for number in range(self.num_layers):
            before = entry["h"][:, number], entry["c"][:, number]
            read, h_n, c_n = self._layer_in_slots(y_BTH, before, slots, number)
            if not torch.isfinite(c_n).all():
                # A NaN survives a shut gate (0 x NaN is NaN), but must not survive its episode.
                read, h_n, c_n = self._layer_by_steps(y_BTH, before, clear_BT, valid_BT, number)
            y_BTH = read
            h.append(h_n)
            c.append(c_n)
        return y_BTH, self._state(h, c)

    def _layer_in_slots(
        self, x_BTD: Tensor, before: tuple[Tensor, Tensor], slots: Slots, number: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        weight_ih, weight_hh, bias_ih, bias_hh = self.layer(number)
        weights = [torch.cat([weight_ih, self._drive], dim=1), weight_hh, bias_ih, bias_hh]
        entry = tuple(part[None].contiguous() for part in before)
        y_SBH, _, c_1BH = torch.lstm(
            slots.spread(x_BTD), entry, weights, True, 1, 0.0, self.training, False, False
        )
        h_BH = torch.where(slots.empty_B[:, None], before[0], y_SBH.flatten(0, 1)[slots.last_B])
        return slots.collect(y_SBH), h_BH, c_1BH[0]

    def _layer_by_steps(
        self,
        x_BTD: Tensor,
        before: tuple[Tensor, Tensor],
        clear_BT: Tensor,
        valid_BT: Tensor,
        number: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_TBD, clear_TB, valid_TB = (part.transpose(0, 1) for part in (x_BTD, clear_BT, valid_BT))
        y_TBH, h, c = reference.lstm_layer(x_TBD, *before, clear_TB, valid_TB, self.layer(number))
        return y_TBH.transpose(0, 1), h, c

    def _state(self, h: Iterable[Tensor], c: Iterable[Tensor]) -> TensorDict:
        """Stack the layers into a state, cut from the graph: this is where gradients end."""
        leaves = {"h": torch.stack(list(h), dim=1), "c": torch.stack(list(c), dim=1)}
        batch = len(leaves["h"])
        return TensorDict({key: leaf.detach() for key, leaf in leaves.items()}, batch_size=[batch])
