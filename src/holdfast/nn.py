"""LSTM, GRU and MinLSTM as torch modules that reset their state at episode starts inside a sequence.

    lstm = holdfast.nn.LSTM(64, 128)             # the constructor, the weights' names and the state of torch.nn.LSTM
    y, (h, c) = lstm(x, (h, c), first)           # first[T,B]: true where an observation starts an episode

Without `first` and `valid` they compute what torch.nn computes. No part of the trainer is imported.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
from tensordict import TensorDict
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from holdfast import memory
from holdfast.errors import ConfigError, ContractError
from holdfast.memory import Kernel
from holdfast.memory.cell import Cell, from_layers_first
from holdfast.memory.rnn import StackedRNN
from holdfast.types import Tensor

__all__ = ["GRU", "LSTM", "MinLSTM"]

Leaves = tuple[Tensor, ...]
"""The tensors `[L,B,H]` of a state: `h, c` of an LSTM, `h` of the others."""


class _Recurrent(nn.Module):
    """Torch's interface of a cell: time first unless `batch_first`, a state with the layers first."""

    batch_first: bool
    detach: bool
    cell: Cell
    keys: ClassVar[tuple[str, ...]]

    def run(self, x: Any, state: Leaves | None, first: Tensor | None, valid: Tensor | None) -> tuple[Tensor, Leaves]:
        """Run a sequence `[T,B,D]`, or `[T,D]` without a batch; return the outputs and the leaves of the state."""
        cell, is_batched = self.cell, self._check_input(x)
        if not is_batched:
            x, first, valid = (each if each is None else each.unsqueeze(self._batch_axis) for each in (x, first, valid))
            state = state if state is None else tuple(leaf.unsqueeze(1) for leaf in state)
        leaves = self._check_state(x, state)
        masks = [self._check_mask(x, name, mask) for name, mask in (("first", first), ("valid", valid))]
        before = from_layers_first(self.keys, leaves, detach=self.detach)
        y, after = self._run_cell(cell, x if self.batch_first else x.transpose(0, 1), before, masks)
        y = y if self.batch_first else y.transpose(0, 1)
        leaves = tuple(after[key].transpose(0, 1).contiguous() for key in self.keys)
        if is_batched:
            return y, leaves
        return y.squeeze(self._batch_axis), tuple(leaf.squeeze(1) for leaf in leaves)

    def _run_cell(
        self, cell: Cell, x_BTD: Tensor, before: TensorDict, masks: Sequence[Tensor | None]
    ) -> tuple[Tensor, TensorDict]:
        first, valid = masks
        if first is None:
            first = torch.zeros(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
        if x_BTD.shape[1] == 1:
            y_BH, after = cell(x_BTD[:, 0], before, first[:, 0], None if valid is None else valid[:, 0])
            return y_BH[:, None], after
        return cell(x_BTD, before, first, valid)

    @property
    def _batch_axis(self) -> int:
        return 0 if self.batch_first else 1

    @property
    def _time_axis(self) -> int:
        return 1 - self._batch_axis

    def _check_input(self, x: Any) -> bool:
        """Raise for an input of a wrong shape; return whether it has a batch axis."""
        size, axes = self.cell.input_size, "[B,T," if self.batch_first else "[T,B,"
        if not isinstance(x, Tensor):
            raise ContractError(
                f"x is a {type(x).__name__}, must be a tensor {axes}{size}]; for padded steps use valid=."
            )
        if x.dim() not in (2, 3) or x.shape[-1] != size or not x.shape[self._time_axis if x.dim() == 3 else 0]:
            raise ContractError(f"x is {list(x.shape)}, must be {axes}{size}] or [T,{size}] with at least one step.")
        return x.dim() == 3

    def _check_state(self, x: Tensor, state: Leaves | None) -> Leaves:
        size = (self.cell.num_layers, x.shape[self._batch_axis], self.cell.hidden_size)
        if state is None:
            zeros = torch.zeros(size, dtype=next(self.parameters()).dtype, device=x.device)
            return (zeros,) * len(self.keys)
        shapes = [list(leaf.shape) for leaf in state]
        if shapes != [list(size)] * len(self.keys):
            raise ContractError(
                f"The state is {shapes}, must be {[list(size)] * len(self.keys)}: layers, batch, hidden."
            )
        return state

    def _check_mask(self, x: Tensor, name: str, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        if mask.shape != x.shape[:2]:
            raise ContractError(f"{name} is {list(mask.shape)}, must be {list(x.shape[:2])} as the first axes of x.")
        mask = mask if mask.dtype == torch.bool else mask != 0
        return mask if self.batch_first else mask.T


class _TorchRNN(_Recurrent, nn.RNNBase):
    """`torch.nn.LSTM` or `torch.nn.GRU` by our cell: the same weights by the same names, and the same initial ones.

    Not a subclass of `torch.nn.LSTM`, which `torch.compile` refuses. `dropout`, `bidirectional` and `proj_size` are
    refused. `detach`: no gradient enters or leaves by the state. `kernel`: auto, torch or triton.
    """

    torch_mode: ClassVar[str]
    cell_class: ClassVar[type[StackedRNN]]
    kernel: Kernel

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        detach: bool = False,
        kernel: Kernel = "auto",
    ) -> None:
        name = f"holdfast.nn.{type(self).__name__}"
        if dropout:
            raise ConfigError(f"{name}(dropout={dropout}): replay needs the same masks; use 0 and nn.Dropout on y.")
        if bidirectional:
            raise ConfigError(f"{name}(bidirectional=True): an agent cannot read later steps; use False.")
        if proj_size:
            raise ConfigError(f"{name}(proj_size={proj_size}) is not supported; use 0 and nn.Linear on y.")
        nn.RNNBase.__init__(
            self, self.torch_mode, input_size, hidden_size, num_layers, bias, batch_first, device=device, dtype=dtype
        )
        self.detach, self.kernel = detach, kernel
        self._set_cell()

    def _set_cell(self) -> None:
        cell = self.cell_class.__new__(self.cell_class)
        StackedRNN.__init__(cell, self)
        cell.detach, cell.kernel = self.detach, self.kernel
        # Not a submodule: the weights are this module's, under torch's names.
        self.__dict__["cell"] = cell

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        module = super()._apply(fn, recurse)
        self._set_cell()
        return module

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_cell()


@final
class LSTM(_TorchRNN):
    """`torch.nn.LSTM` that resets its state where `first` is true; the state is `(h, c)`."""

    torch_mode = "LSTM"
    keys = ("h", "c")
    cell_class = memory.LSTM

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: tuple[Tensor, Tensor] | None = None,
        first: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run a sequence; where `valid` is false the output is 0 and the state unchanged."""
        y, (h, c) = self.run(x, state, first, valid)
        return y, (h, c)


@final
class GRU(_TorchRNN):
    """`torch.nn.GRU` that resets its state where `first` is true."""

    torch_mode = "GRU"
    keys = ("h",)
    cell_class = memory.GRU

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: Tensor | None = None,
        first: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a sequence; where `valid` is false the output is 0 and the state unchanged."""
        y, (h,) = self.run(x, None if state is None else (state,), first, valid)
        return y, h


@final
class MinLSTM(_Recurrent):
    """Stacked minLSTM layers, computed by a parallel scan, with the interface of `torch.nn.GRU`."""

    keys = ("h",)

    def __init__(
        self, input_size: int, hidden_size: int, num_layers: int = 1, batch_first: bool = False, *, detach: bool = False
    ) -> None:
        super().__init__()
        self.batch_first, self.detach = batch_first, detach
        self.cell = memory.MinLSTM(input_size, hidden_size, num_layers)
        self.cell.detach = detach

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: Tensor | None = None,
        first: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a sequence; where `valid` is false the output is 0 and the state unchanged."""
        y, (h,) = self.run(x, None if state is None else (state,), first, valid)
        return y, h
