"""Components that remember: their cells live in the policy's one memory, and the graph finds them."""

from collections.abc import Sequence
from typing import Any

from holdfast.memory import Cell, MemoryInit, make_cell
from holdfast.policies.components.component import Component, Shape, Size, require_axes
from holdfast.worlds.step import WorldSpec


class Memory(Component):
    """A memory of any kind: `cell` is lstm, gru, minlstm, none, or package.module:Class.

    It only says which cell there is. The policy calls all cells itself, with rows and steps told apart,
    `[B,T,D]` (a flat batch says its shape by `bptt` and `batch`), and with the states and the clears of
    the call.
    """

    def __init__(
        self,
        cell: str = "lstm",
        hidden_size: Size = 128,
        num_layers: Size = 2,
        init: MemoryInit = "standard",
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


class LSTM(Memory):
    """The memory of the seeds: an LSTM, unless the run asks for another by `policy.memory`."""

    def __init__(self, hidden_size: Size = 128, num_layers: Size = 2) -> None:
        super().__init__("lstm", hidden_size, num_layers)
