"""LSTM and GRU cells: the layers of layers.py with a TensorDict as state."""

from operator import itemgetter
from typing import Literal, final

import torch
from torch import nn

from holdfast.memory.cell import LayeredCell
from holdfast.memory.layers import GRULayers, LSTMLayers, RecurrentLayers


class StackedRNN(RecurrentLayers, LayeredCell):
    """Stacked recurrent layers; the state has a leaf `[B,L,H]` for each of `state_keys`."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__(rnn.input_size, rnn.hidden_size, rnn.num_layers)
        self.rnn = rnn

    def torch_rnn(self) -> nn.RNNBase:
        """Return the module that has the weights."""
        return self.rnn


def _orthogonal(rnn: nn.RNNBase) -> nn.RNNBase:
    """Initialize weights as orthogonal and biases as 0."""
    for name, weight in rnn.named_parameters():
        (nn.init.orthogonal_ if name.startswith("weight") else nn.init.zeros_)(weight)
    return rnn


MemoryInit = Literal["standard", "original"]


@final
class LSTM(LSTMLayers, StackedRNN):
    """Stacked LSTM layers; the state is `{"h": [B,L,H], "c": [B,L,H]}`.

    Weights are orthogonal, the forget-gate bias is 1 and the others 0. `init="original"` sets all biases to 1, as
    Metta AI's policies did; that saturates the cell and slows or stops learning.
    """

    # The output depends on tanh(c) only.
    bounded_state = staticmethod(lambda state: state["c"].tanh())

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1, init: MemoryInit = "standard") -> None:
        super().__init__(_orthogonal(nn.LSTM(input_size, hidden_size, num_layers)))
        with torch.no_grad():
            for number in range(num_layers):
                _, _, bias_ih, bias_hh = self.layer(number)
                if init == "original":
                    nn.init.ones_(bias_ih)
                    nn.init.ones_(bias_hh)
                else:
                    bias_ih[hidden_size : 2 * hidden_size] = 1.0


@final
class GRU(GRULayers, StackedRNN):
    """Stacked GRU layers; the state is `{"h": [B,L,H]}`. Weights are orthogonal, biases 0."""

    bounded_state = staticmethod(itemgetter("h"))

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(_orthogonal(nn.GRU(input_size, hidden_size, num_layers)))
