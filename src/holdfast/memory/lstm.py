"""The LSTM cell: any number of layers, clears at any step, no loop over time."""

from collections.abc import Iterable
from typing import Literal, final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory import reference
from holdfast.memory.cell import Cell, require_fit, select_rows
from holdfast.memory.slots import SHUT, plan_slots
from holdfast.shapes import Bool, Float, Tensor

MemoryInit = Literal["standard", "original"]


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
        super().__init__(input_size, hidden_size, num_layers)
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
        require_fit(self, x, state, clear)
        first = clear if x.dim() == 2 else clear[:, 0]
        entry = select_rows(first, self.initial(len(x)), state)
        if x.dim() == 2:
            return self._one_step(x, entry, valid)
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
        return reference.lstm(self, x, state, clear, valid)

    def layer(self, number: int) -> reference.LayerWeights:
        """Return one layer's weights."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        a, b, c, d = (getattr(self.rnn, f"{name}_l{number}") for name in names)
        return a, b, c, d

    def _one_step(self, x_BD: Tensor, entry: TensorDict, valid: Tensor | None) -> tuple[Tensor, TensorDict]:
        y_B1H, after = self._dense(x_BD[:, None], entry)
        if valid is None:
            return y_B1H[:, 0], after
        return torch.where(valid[:, None], y_B1H[:, 0], 0.0), select_rows(valid, after, entry)

    def _dense(self, x_BTD: Tensor, entry: TensorDict) -> tuple[Tensor, TensorDict]:
        h_LBH, c_LBH = (entry[key].transpose(0, 1).contiguous() for key in ("h", "c"))
        weights = [weight for number in range(self.num_layers) for weight in self.layer(number)]
        y_TBH, h_LBH, c_LBH = torch.lstm(
            x_BTD.transpose(0, 1),
            (h_LBH, c_LBH),
            weights,
            True,
            self.num_layers,
            0.0,
            self.training,
            False,
            False,
        )
        return y_TBH.transpose(0, 1), self._state(h_LBH.unbind(), c_LBH.unbind())

    def _in_slots(
        self, x_BTD: Tensor, entry: TensorDict, clear_BT: Tensor, valid_BT: Tensor
    ) -> tuple[Tensor, TensorDict]:
        """Run every layer over slots; blank and hold slots come out as zeros and go so into the next."""
        slots = plan_slots(clear_BT, valid_BT, x_BTD.dtype)
        h, c, y_SBH = [], [], slots.spread(x_BTD)
        for number in range(self.num_layers):
            h_BH, c_BH = entry["h"][:, number], entry["c"][:, number]
            weight_ih, *others = self.layer(number)
            weights = [torch.cat([weight_ih, self._drive], dim=1), *others]
            y_SBH, _, c_1BH = torch.lstm(
                torch.cat([y_SBH, slots.drive_SB2], dim=-1),
                (h_BH[None].contiguous(), c_BH[None].contiguous()),
                _in_one_chunk(weights) if x_BTD.is_cuda else weights,
                True,
                1,
                0.0,
                self.training,
                False,
                False,
            )
            h.append(torch.where(slots.empty_B[:, None], h_BH, y_SBH.flatten(0, 1)[slots.last_B]))
            c.append(c_1BH[0])
        if not all(torch.isfinite(part).all() for part in c):
            # A NaN survives a shut gate (0 x NaN is NaN), but must not survive its episode.
            return self.plain(x_BTD, entry, clear_BT, valid_BT)
        return slots.collect(y_SBH), self._state(h, c)

    def _state(self, h: Iterable[Tensor], c: Iterable[Tensor]) -> TensorDict:
        """Stack the layers into a state, cut from the graph: this is where gradients end."""
        leaves = {"h": torch.stack(list(h), dim=1), "c": torch.stack(list(c), dim=1)}
        batch = len(leaves["h"])
        return TensorDict({key: leaf.detach() for key, leaf in leaves.items()}, batch_size=[batch])


def _in_one_chunk(weights: list[Tensor]) -> list[Tensor]:
    """Lay weights end to end in one piece of memory, as cuDNN wants them; it warns if they are not."""
    flat = torch.cat([weight.flatten() for weight in weights])
    pieces = flat.split([weight.numel() for weight in weights])
    return [piece.view(weight.shape) for piece, weight in zip(pieces, weights, strict=True)]
