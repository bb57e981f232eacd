"""The minLSTM cell: its gates read only the input, so that a segment is one scan, no loop over time."""

from functools import partial
from typing import final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory import reference
from holdfast.memory.cell import Cell, require_fit, stack_layers
from holdfast.memory.scan import scan
from holdfast.shapes import Bool, Float, Tensor


@final
class MinLSTM(Cell):
    """A stack of minLSTM layers as a pure cell; its state is `{"h": [B,L,H]}`.

    f, i = sigmoid(.), h' = f/(f+i) h + i/(f+i) w, each a linear map of the input: a first-order
    recurrence h' = a h + b, scanned in linear space with a = 0 at clears, so that they are exact.
    Feng et al. 2024, "Were RNNs all we needed?"; their log-space form has no exact clear.
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)
        sizes = [input_size, *[hidden_size] * (num_layers - 1)]
        self.gates = nn.ModuleList(_gates(size, hidden_size) for size in sizes)

    def initial(self, batch: int) -> TensorDict:
        """Make the state of `batch` agents that remember nothing yet: zeros."""
        zeros = next(self.parameters()).new_zeros(batch, self.num_layers, self.hidden_size)
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
        if x.dim() == 2:
            valid_B1 = None if valid is None else valid[:, None]
            y, after = self.forward(x[:, None], state, clear[:, None], valid_B1)
            return y[:, 0], after
        read = torch.ones_like(clear) if valid is None else valid
        y, last = x, []
        for number in range(self.num_layers):
            a, b = self.recurrence(number, y, clear, read)
            h_BTH = scan(a, b, torch.where(clear[:, :1], 0.0, state["h"][:, number]))
            if x.shape[1] > 1 and not torch.isfinite(h_BTH).all():
                # 0 x NaN is NaN: in a scan it would survive its episode, and must not. One step is no scan.
                return self.plain(x, state, clear, valid)
            last.append([h_BTH[:, -1]])
            y = torch.where(read[..., None], h_BTH, 0.0)
        return y, stack_layers(["h"], last)

    def plain(
        self,
        x: Float[Tensor, "B T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T H"], TensorDict]:
        """Read a segment step by step."""
        layers = [partial(self.recurrence, number) for number in range(self.num_layers)]
        return reference.run(reference.minlstm_layer, layers, ["h"], x, state, clear, valid)

    def recurrence(
        self, number: int, x: Float[Tensor, "B T D"], clear: Bool[Tensor, "B T"], read: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H"]]:
        """Work out a and b of h' = a h + b: 0 and b at clears, 1 and 0 where nobody acts."""
        gates = self.gates[number](x)
        # Layers may compute in less than is remembered; the recurrence itself does not.
        forget, take, what = gates.to(self.gates[number].weight.dtype).chunk(3, dim=-1)
        # f/(f+i) without dividing: it is the logistic of log f - log i.
        keep = torch.sigmoid(nn.functional.logsigmoid(forget) - nn.functional.logsigmoid(take))
        a, b = keep, (1 - keep) * what
        a, b = torch.where(read[..., None], a, 1.0), torch.where(read[..., None], b, 0.0)
        return torch.where(clear[..., None], 0.0, a), b


def _gates(input_size: int, hidden_size: int) -> nn.Linear:
    layer = nn.Linear(input_size, 3 * hidden_size)
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    with torch.no_grad():
        # Remember rather than forget at first, as the LSTM does.
        layer.bias[:hidden_size] = 1.0
    return layer
