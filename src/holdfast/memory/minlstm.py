"""The MinLSTM cell: the layers of scan.py with a TensorDict as state."""

from typing import final

from holdfast.memory.cell import LayeredCell
from holdfast.memory.scan import MinLSTMLayers, make_gates


@final
class MinLSTM(MinLSTMLayers, LayeredCell):
    """Stacked minLSTM layers; the state is `{"h": [B,L,H]}`."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)
        self.gates = make_gates(input_size, hidden_size, num_layers)
