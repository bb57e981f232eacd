"""The cells written out step by step: slow, plain, and what every fast path is measured against."""

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict

from holdfast.shapes import Bool, Float, Tensor

if TYPE_CHECKING:
    from holdfast.memory.gru import GRU
    from holdfast.memory.lstm import LSTM
    from holdfast.memory.minlstm import MinLSTM

LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""`weight_ih [GH,D], weight_hh [GH,H], bias_ih [GH], bias_hh [GH]`: LSTM gates i f g o, GRU gates r z n."""


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


def lstm(
    cell: "LSTM",
    x_BTD: Float[Tensor, "B T D"],
    state: TensorDict,
    clear_BT: Bool[Tensor, "B T"],
    valid_BT: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H"], TensorDict]:
    """Do what `cell(x, state, clear, valid)` does over a segment, layer by layer and step by step."""
    valid_TB = torch.ones_like(clear_BT).T if valid_BT is None else valid_BT.T
    y_TBH, after = x_BTD.transpose(0, 1), []
    for number in range(cell.num_layers):
        before = state["h"][:, number], state["c"][:, number]
        y_TBH, *last = lstm_layer(y_TBH, *before, clear_BT.T, valid_TB, cell.layer(number))
        after.append(last)
    h, c = (torch.stack(parts, dim=1).detach() for parts in zip(*after, strict=True))
    return y_TBH.transpose(0, 1), TensorDict({"h": h, "c": c}, batch_size=[len(x_BTD)])


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


def gru(
    cell: "GRU",
    x_BTD: Float[Tensor, "B T D"],
    state: TensorDict,
    clear_BT: Bool[Tensor, "B T"],
    valid_BT: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H"], TensorDict]:
    """Do what a GRU cell does over a segment, layer by layer and step by step."""
    valid_TB = torch.ones_like(clear_BT).T if valid_BT is None else valid_BT.T
    y_TBH, after = x_BTD.transpose(0, 1), []
    for number in range(cell.num_layers):
        before = state["h"][:, number]
        y_TBH, last = gru_layer(y_TBH, before, clear_BT.T, valid_TB, cell.layer(number))
        after.append(last)
    h = torch.stack(after, dim=1).detach()
    return y_TBH.transpose(0, 1), TensorDict({"h": h}, batch_size=[len(x_BTD)])


def minlstm(
    cell: "MinLSTM",
    x_BTD: Float[Tensor, "B T D"],
    state: TensorDict,
    clear_BT: Bool[Tensor, "B T"],
    valid_BT: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H"], TensorDict]:
    """Do what a minLSTM cell does over a segment, layer by layer and step by step."""
    read_BT = torch.ones_like(clear_BT) if valid_BT is None else valid_BT
    y_BTH, after = x_BTD, []
    for number in range(cell.num_layers):
        # A clear is made by selection here, so its a is not needed.
        a_BTH, b_BTH = cell.recurrence(number, y_BTH, torch.zeros_like(clear_BT), read_BT)
        h_BH, outputs = state["h"][:, number], []
        nothing = torch.zeros_like(h_BH)
        for t in range(x_BTD.shape[1]):
            h_BH = torch.where(clear_BT[:, t, None], nothing, h_BH)
            h_BH = a_BTH[:, t] * h_BH + b_BTH[:, t]
            outputs.append(torch.where(read_BT[:, t, None], h_BH, nothing))
        y_BTH = torch.stack(outputs, dim=1)
        after.append(h_BH)
    h = torch.stack(after, dim=1).detach()
    return y_BTH, TensorDict({"h": h}, batch_size=[len(x_BTD)])
