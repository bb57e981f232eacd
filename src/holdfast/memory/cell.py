"""What a memory cell is: a pure function of input, state and clears, with weights and nothing else."""

from abc import ABC, abstractmethod
from functools import partial

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.shapes import Bool, Float, Tensor


class Cell(nn.Module, ABC):
    """`y, state = cell(x, state, clear)`: clear, then read; the state that comes out has no graph.

    One step takes `x[B,D]` and `clear[B]`, a segment `x[B,T,D]` and `clear[B,T]`; both give the same
    numbers. Where `clear` is true a row forgets everything before it reads that step. Where `valid`
    is false nobody acts: the step is not read (a clear there still counts) and its output is zero.
    A state is a TensorDict whose leaves start with the batch axis.
    """

    input_size: int
    output_size: int

    @abstractmethod
    def initial(self, batch: int) -> TensorDict:
        """Make the state of `batch` agents that remember nothing yet, beside the weights."""

    @abstractmethod
    def forward(
        self,
        x: Float[Tensor, "B *T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B *T"],
        valid: Bool[Tensor, "B *T"] | None = None,
    ) -> tuple[Float[Tensor, "B *T H"], TensorDict]:
        """Read one step or one segment."""


def select_rows(mask: Bool[Tensor, " B"], yes: TensorDict, no: TensorDict) -> TensorDict:
    """Take `yes` where the mask is true and `no` elsewhere, by selection: 0 x NaN would be NaN."""
    return yes.apply(partial(_choose, mask), no)  # pyright: ignore[reportReturnType]


def _choose(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.reshape(-1, *[1] * (yes.dim() - 1)), yes, no)
