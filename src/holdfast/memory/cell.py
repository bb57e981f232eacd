"""What a memory cell is: a pure function of input, state and clears, with weights and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ContractError
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
    squash: ClassVar[Callable[[TensorDict], Tensor] | None] = None
    """What of a state lies between -1 and 1, a number a unit; none: it has no bounds."""

    def __init__(self, input_size: int, hidden_size: int, num_layers: int = 1) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, hidden_size
        self.hidden_size, self.num_layers = hidden_size, num_layers

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

    @abstractmethod
    def plain(
        self,
        x: Float[Tensor, "B T D"],
        state: TensorDict,
        clear: Bool[Tensor, "B T"],
        valid: Bool[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T H"], TensorDict]:
        """Read a segment as `forward` does, written out step by step: what it is measured against."""


def require_fit(cell: Cell, x: Tensor, state: TensorDict, clear: Tensor) -> None:
    """Refuse inputs that do not fit a cell and each other."""
    # Not every kernel looks: one that reads past its input gives plausible nonsense.
    if x.shape[-1] != cell.input_size or len(state) != len(x) or clear.shape != x.shape[:-1]:
        raise ContractError(
            f"The memory reads {cell.input_size} numbers a step and got x {list(x.shape)} with "
            f"{len(state)} states and clears {list(clear.shape)}. "
            "Is input_size the size of what encode returns?"
        )


def select_rows(mask: Bool[Tensor, " B"], yes: TensorDict, no: TensorDict) -> TensorDict:
    """Take `yes` where the mask is true and `no` elsewhere, by selection: 0 x NaN would be NaN."""
    return yes.apply(partial(_choose, mask), no)  # pyright: ignore[reportReturnType]


def like(state: TensorDict, before: TensorDict) -> TensorDict:
    """Give a state the precision of the one before it: layers may compute in less than is remembered."""
    return TensorDict(
        {key: leaf.to(before[key].dtype) for key, leaf in state.items()}, batch_size=state.batch_size
    )


def stack_layers(leaves: Sequence[str], layers: Iterable[Sequence[Tensor]]) -> TensorDict:
    """Stack what each layer leaves into a state, cut from the graph: this is where gradients end."""
    each = zip(*layers, strict=True)
    stacked = [(torch.stack(parts, dim=1) if parts[1:] else parts[0][:, None]).detach() for parts in each]
    return TensorDict(dict(zip(leaves, stacked, strict=True)), batch_size=[len(stacked[0])])


def _choose(mask: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(mask.reshape(-1, *[1] * (yes.dim() - 1)), yes, no)
