"""The LSTM written out step by step: slow, plain, and what every fast path is measured against."""

import torch

from holdfast.shapes import Bool, Float, Tensor

LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""`weight_ih [4H,D], weight_hh [4H,H], bias_ih [4H], bias_hh [4H]`, gates in the order i f g o."""


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
