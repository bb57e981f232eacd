"""The GRU cell: any number of layers, clears at any step, no loop over time."""

from collections.abc import Iterable
from typing import final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory import reference
from holdfast.memory.cell import Cell, require_fit, select_rows
from holdfast.memory.slots import SHUT, plan_slots
from holdfast.shapes import Bool, Float, Tensor


@final
class GRU(Cell):
    """A stack of GRU layers as a pure cell; its state is `{"h": [B,L,H]}`.

    Weights are orthogonal, biases 0. Clears inside a segment are blank slots, as in the LSTM: update
    and reset gates are driven shut and the candidate gets no bias, so that the state that leaves a
    blank is exactly zero.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)
        self.rnn = nn.GRU(input_size, hidden_size, num_layers)
        for name, weight in self.rnn.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(weight)
            else:
                nn.init.zeros_(weight)
        # The drives of a blank slot and of a hold, on the gates r z n: see slots.py.
        drive = torch.tensor([[SHUT, SHUT], [SHUT, -SHUT], [0.0, 0.0]])
        self.register_buffer("_drive", drive.repeat_interleave(hidden_size, 0), persistent=False)
        self._drive: Tensor

    def initial(self, batch: int) -> TensorDict:
        """Make the state of `batch` agents that remember nothing yet: zeros."""
        weight, *_ = self.layer(0)
        zeros = weight.new_zeros(batch, self.num_layers, self.hidden_size)
        return TensorDict({"h": zeros}, batch_size=[batch])

    def forward(
        self,
        x: Float[Tensor, "B *T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B *T"],
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> tuple[Float[Tensor, "B *T H"], TensorDict]:
        """Read one step `[B,D]` or one segment `[B,T,D]`."""
        require_fit(self, x, state, clear)
        first = clear if x.dim() == 2 else clear[:, 0]
        entry = select_rows(first, self.initial(len(x)), state)
        if x.dim() == 2:
            y_B1H, after = self._dense(x[:, None], entry)
            if valid is None:
                return y_B1H[:, 0], after
            return torch.where(valid[:, None], y_B1H[:, 0], 0.0), select_rows(valid, after, entry)
        if not clear[:, 1:].any() and (valid is None or valid.all()):
            return self._dense(x, entry)
        return self._in_slots(x, entry, clear, torch.ones_like(clear) if valid is None else valid)

    def plain(
        self,
        x: Float[Tensor, "B T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T H"], TensorDict]:
        """Read a segment step by step."""
        return reference.gru(self, x, state, clear, valid)

    def layer(self, number: int) -> reference.LayerWeights:
        """Return one layer's weights."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        a, b, c, d = (getattr(self.rnn, f"{name}_l{number}") for name in names)
        return a, b, c, d

    def _dense(self, x_BTD: Tensor, entry: TensorDict) -> tuple[Tensor, TensorDict]:
        h_LBH = entry["h"].transpose(0, 1).contiguous()
        weights = [weight for number in range(self.num_layers) for weight in self.layer(number)]
        x_TBD = x_BTD.transpose(0, 1)
        y_TBH, h_LBH = torch.gru(
            x_TBD, h_LBH, weights, True, self.num_layers, 0.0, self.training, False, False
        )
        return y_TBH.transpose(0, 1), self._state(h_LBH.unbind())

    def _in_slots(
        self, x_BTD: Tensor, entry: TensorDict, clear_BT: Tensor, valid_BT: Tensor
    ) -> tuple[Tensor, TensorDict]:
        """Run every layer over slots; what comes out of blanks and holds is read by nobody."""
        slots = plan_slots(clear_BT, valid_BT, x_BTD.dtype)
        idle_SB1 = slots.drive_SB2.sum(-1, keepdim=True)
        flags_SB3 = torch.cat([slots.drive_SB2, 1 - idle_SB1], dim=-1)
        h, y_SBH = [], slots.spread(x_BTD)
        for number in range(self.num_layers):
            h_BH = entry["h"][:, number]
            weight_ih, weight_hh, bias_ih, bias_hh = self.layer(number)
            gates, candidate = bias_ih.split([2 * self.hidden_size, self.hidden_size])
            # The candidate's bias comes with real steps only: in blanks and holds it is exactly 0, and so is
            # what they add to its gradient; n + z (h - n) is then exactly 0 and exactly h.
            column = torch.cat([torch.zeros_like(gates), candidate])[:, None]
            bias = torch.cat([gates, torch.zeros_like(candidate)])
            weights = [torch.cat([weight_ih, self._drive, column], dim=1), weight_hh, bias, bias_hh]
            x_SBD = torch.cat([y_SBH, flags_SB3], dim=-1)
            y_SBH, h_1BH = torch.gru(
                x_SBD, h_BH[None].contiguous(), weights, True, 1, 0.0, self.training, False, False
            )
            h.append(h_1BH[0])
            # Into the next layer blanks and holds go as zeros, so that its own drives are all it reads.
            y_SBH = torch.where(idle_SB1 > 0, 0.0, y_SBH)
        if not all(torch.isfinite(part).all() for part in h):
            # A NaN survives a shut gate (0 x NaN is NaN), but must not survive its episode.
            return self.plain(x_BTD, entry, clear_BT, valid_BT)
        return slots.collect(y_SBH), self._state(h)

    def _state(self, h: Iterable[Tensor]) -> TensorDict:
        """Stack the layers into a state, cut from the graph: this is where gradients end."""
        leaf = torch.stack(list(h), dim=1).detach()
        return TensorDict({"h": leaf}, batch_size=[len(leaf)])
