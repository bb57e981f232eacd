"""No memory: a layer that reads the present only, for comparison."""

from typing import final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory.cell import Cell, require_fit
from holdfast.shapes import Bool, Float, Tensor


@final
class NoMemory(Cell):
    """One linear layer and a ReLU in the place of a memory; its state is empty."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__(input_size, hidden_size, num_layers)
        self.layer = nn.Linear(input_size, hidden_size)
        nn.init.orthogonal_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def initial(self, batch: int) -> TensorDict:
        """Make the state of `batch` agents: nothing."""
        return TensorDict({}, batch_size=[batch], device=self.layer.weight.device)

    def forward(
        self,
        x: Float[Tensor, "B *T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B *T"],
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> tuple[Float[Tensor, "B *T H"], TensorDict]:
        """Read one step `[B,D]` or one segment `[B,T,D]`."""
        require_fit(self, x, state, clear)
        y = torch.relu(self.layer(x))
        y = y if valid is None else torch.where(valid[..., None], y, 0.0)
        return y, self.initial(len(x))

    def plain(
        self,
        x: Float[Tensor, "B T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T H"], TensorDict]:
        """Read a segment step by step."""
        steps = [
            self(each, state, cleared)[0] for each, cleared in zip(x.unbind(1), clear.unbind(1), strict=True)
        ]
        y = torch.stack(steps, dim=1)
        return (y if valid is None else torch.where(valid[..., None], y, 0.0)), self.initial(len(x))
