"""Several memories as one: each keeps its own state, and the live store keeps them together."""

from collections.abc import Mapping
from typing import final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory.cell import Cell, require_fit
from holdfast.shapes import Bool, Float, Tensor


@final
class Bundle(Cell):
    """Cells side by side: each reads its share of the input; a leaf of its state is called `NAME.leaf`."""

    def __init__(self, parts: Mapping[str, Cell]) -> None:
        sizes = [(part.input_size, part.output_size) for part in parts.values()]
        super().__init__(*map(sum, zip(*sizes, strict=True)))
        self.parts = nn.ModuleDict(parts)

    def initial(self, batch: int) -> TensorDict:
        """Make the states of `batch` agents that remember nothing yet."""
        return self.join({name: cell.initial(batch) for name, cell in self.cells.items()})

    @property
    def cells(self) -> dict[str, Cell]:
        """The cells by name."""
        return {name: cell for name, cell in self.parts.items() if isinstance(cell, Cell)}

    def split(self, state: TensorDict) -> dict[str, TensorDict]:
        """Give each cell its own state."""
        return {
            name: TensorDict(
                {key: state[f"{name}.{key}"] for key in cell.initial(0).keys()},  # noqa: SIM118
                batch_size=state.batch_size,
            )
            for name, cell in self.cells.items()
        }

    def join(self, states: Mapping[str, TensorDict]) -> TensorDict:
        """Put the states of all cells together."""
        leaves = {f"{name}.{key}": leaf for name, state in states.items() for key, leaf in state.items()}
        batch = next(iter(states.values())).batch_size
        return TensorDict(leaves, batch_size=batch)

    def forward(
        self,
        x: Float[Tensor, "B *T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B *T"],
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> tuple[Float[Tensor, "B *T H"], TensorDict]:
        """Let every cell read its share of one step `[B,D]` or one segment `[B,T,D]`."""
        require_fit(self, x, state, clear)
        return self._each("forward", x, state, clear, valid)

    def plain(
        self,
        x: Float[Tensor, "B T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T H"], TensorDict]:
        """Let every cell read its share step by step."""
        return self._each("plain", x, state, clear, valid)

    def _each(
        self, how: str, x: Tensor, state: TensorDict, clear: Tensor, valid: Tensor | None
    ) -> tuple[Tensor, TensorDict]:
        shares = x.split([cell.input_size for cell in self.cells.values()], -1)
        states, said, after = self.split(state), [], {}
        for (name, cell), share in zip(self.cells.items(), shares, strict=True):
            y, after[name] = getattr(cell, how)(share, states[name], clear, valid)
            said.append(y)
        return torch.cat(said, -1), self.join(after)
