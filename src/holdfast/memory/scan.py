"""minLSTM layers on tensors, computed by a parallel scan."""

from functools import partial

import torch
from torch import nn

from holdfast.memory import reference
from holdfast.memory.layers import Leaves, LeavesOutput
from holdfast.types import Bool, Float, Tensor


def scan(
    a_BTH: Float[Tensor, "B T H"], b_BTH: Float[Tensor, "B T H"], entry_BH: Float[Tensor, "B H"]
) -> Float[Tensor, "B T H"]:
    """Compute h_t = a_t h_(t-1) + b_t over T in log2(T) passes.

    After the pass over distance d, `a` and `b` at t combine the last 2d steps:
    (a, b) after (a', b') is (a a', a b' + b). Where a is 0, nothing before t remains, exactly.
    """
    # The entry state enters with the first step; it adds exactly 0 where that step clears.
    b_BTH = torch.cat([a_BTH[:, :1] * entry_BH[:, None] + b_BTH[:, :1], b_BTH[:, 1:]], dim=1)
    distance, length = 1, a_BTH.shape[1]
    while distance < length:
        b_late = a_BTH[:, distance:] * b_BTH[:, :-distance] + b_BTH[:, distance:]
        a_late = a_BTH[:, distance:] * a_BTH[:, :-distance]
        b_BTH = torch.cat([b_BTH[:, :distance], b_late], dim=1)
        a_BTH = torch.cat([a_BTH[:, :distance], a_late], dim=1)
        distance *= 2
    return b_BTH


class MinLSTMLayers:
    """Stacked minLSTM layers; the state is a list of one leaf `[B,L,H]`.

    f, i = sigmoid(.), h' = f/(f+i) h + i/(f+i) w, each a linear map of the input: a first-order
    recurrence h' = a h + b, scanned in linear space with a = 0 at clears, so clears are exact.
    Feng et al. 2024, "Were RNNs all we needed?"; their log-space form cannot clear exactly.
    """

    state_keys = ("h",)
    num_layers: int
    gates: nn.ModuleList

    def run(
        self,
        x: Float[Tensor, "B *T D"],
        state: Leaves,
        clear: Bool[Tensor, "B *T"] | None,
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> LeavesOutput:
        """Process one step `[B,D]` or one segment `[B,T,D]`."""
        clear = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device) if clear is None else clear
        if x.dim() == 2:
            valid_B1 = None if valid is None else valid[:, None]
            y, after = self.run(x[:, None], state, clear[:, None], valid_B1)
            return y[:, 0], after
        valid = torch.ones_like(clear) if valid is None else valid
        y, last = x, []
        for number in range(self.num_layers):
            a, b = self.recurrence(number, y, clear, valid)
            h_BTH = scan(a, b, torch.where(clear[:, :1], 0.0, state[0][:, number]))
            if x.shape[1] > 1 and not torch.isfinite(h_BTH).all():
                # 0 x NaN is NaN: in a scan it would survive its episode. A single step is not scanned.
                return self.run_reference(x, state, clear, valid)
            last.append([h_BTH[:, -1]])
            y = torch.where(valid[..., None], h_BTH, 0.0)
        return y, reference.stack_layers(last)

    def run_reference(
        self, x: Float[Tensor, "B T D"], state: Leaves, clear: Bool[Tensor, "B T"], valid: Bool[Tensor, "B T"] | None
    ) -> LeavesOutput:
        """Process a segment step by step."""
        layers = range(self.num_layers)
        steps = [partial(reference.minlstm_step, partial(self.recurrence, number)) for number in layers]
        return reference.run(steps, x, state, clear, valid)

    def recurrence(
        self, number: int, x: Float[Tensor, "B T D"], clear: Bool[Tensor, "B T"], valid: Bool[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B T H"]]:
        """Return a and b of h' = a h + b: a = 0 at clears; a = 1, b = 0 at invalid steps."""
        gates = self.gates[number](x)
        # Under autocast the linear layer computes in less precision; the recurrence does not.
        forget, take, candidate = gates.to(self.gates[number].weight.dtype).chunk(3, dim=-1)
        # f/(f+i) without a division: sigmoid(log f - log i).
        decay = torch.sigmoid(nn.functional.logsigmoid(forget) - nn.functional.logsigmoid(take))
        a, b = decay, (1 - decay) * candidate
        a, b = torch.where(valid[..., None], a, 1.0), torch.where(valid[..., None], b, 0.0)
        return torch.where(clear[..., None], 0.0, a), b


def make_gates(input_size: int, hidden_size: int, num_layers: int, *, bias: bool = True) -> nn.ModuleList:
    """Return the linear map of each layer, orthogonal, with a forget-gate bias of 1."""
    sizes = [input_size, *[hidden_size] * (num_layers - 1)]
    return nn.ModuleList(_gates(size, hidden_size, bias) for size in sizes)


def _gates(input_size: int, hidden_size: int, bias: bool) -> nn.Linear:
    layer = nn.Linear(input_size, 3 * hidden_size, bias)
    nn.init.orthogonal_(layer.weight)
    if bias:
        nn.init.zeros_(layer.bias)
        with torch.no_grad():
            # A forget-gate bias of 1, as in the LSTM.
            layer.bias[:hidden_size] = 1.0
    return layer
