"""The cells written out step by step: slow, plain, and what every fast path is measured against."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict

from holdfast.memory.cell import stack_layers
from holdfast.shapes import Bool, Float, Tensor

LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""`weight_ih [GH,D], weight_hh [GH,H], bias_ih [GH], bias_hh [GH]`: LSTM gates i f g o, GRU gates r z n."""

Layer = Callable[..., Sequence[Tensor]]
"""`y_TBH, *after = layer(x_TBD, *before, clear_TB, valid_TB, weights)`: one layer over a segment."""


def run(
    layer: Layer,
    weights: Iterable[Any],
    leaves: Sequence[str],
    x_BTD: Float[Tensor, "B T D"],
    state: TensorDict,
    clear_BT: Bool[Tensor, "B T"],
    valid_BT: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H"], TensorDict]:
    """Do what a cell of such layers does over a segment, layer by layer and step by step."""
    valid_TB = torch.ones_like(clear_BT).T if valid_BT is None else valid_BT.T
    y_TBH, layers = x_BTD.transpose(0, 1), []
    for number, its_weights in enumerate(weights):
        before = [state[leaf][:, number] for leaf in leaves]
        y_TBH, *after = layer(y_TBH, *before, clear_BT.T, valid_TB, its_weights)
        layers.append(after)
    return y_TBH.transpose(0, 1), stack_layers(leaves, layers)


def lstm_layer(
    x_TBD: Float[Tensor, "T B D"],
    h_BH: Float[Tensor, "B H"],
    c_BH: Float[Tensor, "B H"],
    clear_TB: Bool[Tensor, "T B"],
    valid_TB: Bool[Tensor, "T B"],
    weights: LayerWeights,
) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"], Float[Tensor, "B H"]]:
    """One LSTM layer over a segment: i f o = sigmoid(.), g = tanh(.), c' = f c + i g, h' = o tanh(c')."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    outputs = []
    nothing = torch.zeros_like(h_BH)
    for x, clear, valid in zip(x_TBD, clear_TB[..., None], valid_TB[..., None], strict=True):
        h_BH, c_BH = torch.where(clear, nothing, h_BH), torch.where(clear, nothing, c_BH)
        gates = x @ weight_ih.T + bias_ih + h_BH @ weight_hh.T + bias_hh
        i, f, g, o = gates.chunk(4, dim=-1)
        c = torch.sigmoid(f) * c_BH + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs.append(torch.where(valid, h, nothing))
        h_BH, c_BH = torch.where(valid, h, h_BH), torch.where(valid, c, c_BH)
    return torch.stack(outputs), h_BH, c_BH


def gru_layer(
    x_TBD: Float[Tensor, "T B D"],
    h_BH: Float[Tensor, "B H"],
    clear_TB: Bool[Tensor, "T B"],
    valid_TB: Bool[Tensor, "T B"],
    weights: LayerWeights,
) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"]]:
    """One GRU layer over a segment: r z = sigmoid(.), n = tanh(x.. + r (h..)), h' = (1 - z) n + z h."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    outputs, nothing = [], torch.zeros_like(h_BH)
    for x, clear, valid in zip(x_TBD, clear_TB[..., None], valid_TB[..., None], strict=True):
        h_BH = torch.where(clear, nothing, h_BH)
        r_x, z_x, n_x = (x @ weight_ih.T + bias_ih).chunk(3, dim=-1)
        r_h, z_h, n_h = (h_BH @ weight_hh.T + bias_hh).chunk(3, dim=-1)
        z = torch.sigmoid(z_x + z_h)
        h = (1 - z) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h) + z * h_BH
        outputs.append(torch.where(valid, h, nothing))
        h_BH = torch.where(valid, h, h_BH)
    return torch.stack(outputs), h_BH


def minlstm_layer(
    x_TBD: Float[Tensor, "T B D"],
    h_BH: Float[Tensor, "B H"],
    clear_TB: Bool[Tensor, "T B"],
    valid_TB: Bool[Tensor, "T B"],
    recurrence: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Float[Tensor, "T B H"], Float[Tensor, "B H"]]:
    """One minLSTM layer over a segment: h' = a h + b."""
    # A clear is made by selection here, so its a is not needed.
    never_BT = torch.zeros_like(clear_TB.T)
    a_BTH, b_BTH = recurrence(x_TBD.transpose(0, 1), never_BT, valid_TB.T)
    outputs, nothing = [], torch.zeros_like(h_BH)
    for a, b, clear, valid in zip(
        a_BTH.unbind(1), b_BTH.unbind(1), clear_TB[..., None], valid_TB[..., None], strict=True
    ):
        h_BH = a * torch.where(clear, nothing, h_BH) + b
        outputs.append(torch.where(valid, h_BH, nothing))
    return torch.stack(outputs, dim=1).transpose(0, 1), h_BH
