"""Components that remember: their cells live in the policy's one memory, and the graph finds them."""

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict

from holdfast.memory import Cell, make_cell
from holdfast.policies.components.component import Component, Shape, Size, require_axes
from holdfast.shapes import Bool, Float, Tensor
from holdfast.worlds.step import WorldSpec


class Memory(Component):
    """A memory of any kind: `cell` is lstm, gru, minlstm, none, or package.module:Class.

    The graph calls it with rows and steps told apart, `[B,T,D]`, and with the state and the clears of
    the call; a flat batch says its shape by `bptt` and `batch`.
    """

    def __init__(
        self, cell: str = "lstm", hidden_size: Size = 128, num_layers: Size = 2, init: str = "standard"
    ) -> None:
        super().__init__()
        self.how: dict[str, Any] = {
            "name": cell,
            "hidden_size": hidden_size,
            "num_layers": num_layers,
            "init": init,
        }
        self.cell: Cell

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a vector a step."""
        (size,) = require_axes(sources, "size")
        self.cell = make_cell(input_size=size, **self.how)
        return (self.cell.output_size,)

    def forward(
        self,
        x: Float[Tensor, "B *T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B *T"],
        valid: Bool[Tensor, "B *T"] | None,
    ) -> tuple[Float[Tensor, "B *T H"], TensorDict]:
        """Clear, then read."""
        return self.cell(x, state, clear, valid)


class LSTM(Memory):
    """The memory of the seeds: an LSTM, unless the run asks for another by `policy.memory`."""

    def __init__(self, hidden_size: Size = 128, num_layers: Size = 2) -> None:
        super().__init__("lstm", hidden_size, num_layers)
