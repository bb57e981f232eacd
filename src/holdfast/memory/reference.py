"""Step-by-step cells: slow and plain, the reference of every fast path."""

from collections.abc import Callable, Iterable, Sequence

import torch

from holdfast.types import Bool, Float, Tensor

LayerWeights = tuple[Tensor, Tensor, Tensor, Tensor]
"""`weight_ih [GH,D], weight_hh [GH,H], bias_ih [GH], bias_hh [GH]`: LSTM gates i f g o, GRU gates r z n."""

Step = Callable[..., Sequence[Tensor]]
"""`h, *rest = step(x, h, *rest)`: one step of one layer; `h` is also the output."""


def run(
    steps: Iterable[Step],
    x_BTD: Float[Tensor, "B T D"],
    state: Sequence[Float[Tensor, "B L H"]],
    clear_BT: Bool[Tensor, "B T"],
    valid_BT: Bool[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H"], list[Float[Tensor, "B L H"]]]:
    """Run stacked layers, a step function each, over a segment: layer by layer and step by step."""
    valid_BT = torch.ones_like(clear_BT) if valid_BT is None else valid_BT
    y_TBH, layers = x_BTD.transpose(0, 1), []
    for number, step in enumerate(steps):
        before = [leaf[:, number] for leaf in state]
        y_TBH, *after = run_layer(step, y_TBH, before, clear_BT.T, valid_BT.T)
        layers.append(after)
    return y_TBH.transpose(0, 1), stack_layers(layers)


def stack_layers(layers: Iterable[Sequence[Float[Tensor, "B H"]]]) -> list[Float[Tensor, "B L H"]]:
    """Return the leaves of a state from those of its layers."""
    return [torch.stack(leaf, dim=1) if leaf[1:] else leaf[0][:, None] for leaf in zip(*layers, strict=True)]


def run_layer(
    step: Step,
    x_TBD: Float[Tensor, "T B D"],
    state: Sequence[Float[Tensor, "B H"]],
    clear_TB: Bool[Tensor, "T B"],
    valid_TB: Bool[Tensor, "T B"],
) -> list[Tensor]:
    """Run one layer; return its output and state. Clear, then read; an invalid step outputs 0 and keeps the state."""
    outputs, zero = [], torch.zeros_like(state[0])
    for x_BD, clear, valid in zip(x_TBD, clear_TB[..., None], valid_TB[..., None], strict=True):
        before = [torch.where(clear, zero, leaf) for leaf in state]
        after = step(x_BD, *before)
        outputs.append(torch.where(valid, after[0], zero))
        state = [torch.where(valid, new, old) for new, old in zip(after, before, strict=True)]
    return [torch.stack(outputs), *state]


def lstm_step(weights: LayerWeights, x_BD: Tensor, h_BH: Tensor, c_BH: Tensor) -> tuple[Tensor, Tensor]:
    """One step of an LSTM layer: i f o = sigmoid(.), g = tanh(.), c' = f c + i g, h' = o tanh(c')."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    gates = x_BD @ weight_ih.T + bias_ih + h_BH @ weight_hh.T + bias_hh
    i, f, g, o = gates.chunk(4, dim=-1)
    c_BH = torch.sigmoid(f) * c_BH + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c_BH), c_BH


def gru_step(weights: LayerWeights, x_BD: Tensor, h_BH: Tensor) -> tuple[Tensor]:
    """One step of a GRU layer: r z = sigmoid(.), n = tanh(x.. + r (h..)), h' = (1 - z) n + z h."""
    weight_ih, weight_hh, bias_ih, bias_hh = weights
    r_x, z_x, n_x = (x_BD @ weight_ih.T + bias_ih).chunk(3, dim=-1)
    r_h, z_h, n_h = (h_BH @ weight_hh.T + bias_hh).chunk(3, dim=-1)
    z = torch.sigmoid(z_x + z_h)
    return ((1 - z) * torch.tanh(n_x + torch.sigmoid(r_x + r_h) * n_h) + z * h_BH,)


def minlstm_step(
    recurrence: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], x_BD: Tensor, h_BH: Tensor
) -> tuple[Tensor]:
    """One step of a minLSTM layer: h' = a h + b."""
    # `run_layer` clears and skips by selection, so the recurrence sees neither.
    no_clear_B1 = torch.zeros_like(x_BD[:, :1], dtype=torch.bool)
    a_B1H, b_B1H = recurrence(x_BD[:, None], no_clear_B1, ~no_clear_B1)
    return (a_B1H[:, 0] * h_BH + b_B1H[:, 0],)
