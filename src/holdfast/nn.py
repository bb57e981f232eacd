"""LSTM, GRU and MinLSTM as torch modules that reset their state at episode starts inside a sequence.

    lstm = holdfast.nn.LSTM(64, 128)             # the constructor, the weights' names and the state of torch.nn.LSTM
    y, (h, c) = lstm(x, (h, c), first)           # first[T,B]: true where an observation starts an episode

Without `first` and `valid` they compute what torch.nn computes. No part of the trainer is imported.
"""

from typing import Any, ClassVar, Literal, final

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from holdfast.errors import ConfigError, ContractError
from holdfast.memory.layers import GRULayers, Kernel, LSTMLayers, RecurrentLayers, detached, is_autocast
from holdfast.memory.scan import MinLSTMLayers, make_gates
from holdfast.torch_versions import is_opaque
from holdfast.types import Tensor

__all__ = ["GRU", "LSTM", "MinLSTM"]

Leaves = tuple[Tensor, ...]
"""The tensors `[L,B,H]` of a state: `h, c` of an LSTM, `h` of the others."""


class _Recurrent(nn.Module):
    """Torch's interface of recurrent layers: time first unless `batch_first`, a state with the layers first."""

    input_size: int
    hidden_size: int
    num_layers: int
    batch_first: bool
    detach: bool
    state_keys: ClassVar[tuple[str, ...]]
    run: Any
    """The layers, on batch-first tensors."""
    run_reference: Any
    """The same, step by step."""

    def _refuse(self, dropout: float, bidirectional: bool, proj_size: int) -> None:
        """Raise for options of torch that are not supported."""
        name = f"holdfast.nn.{type(self).__name__}"
        if dropout:
            raise ConfigError(f"{name}(dropout={dropout}): replay needs the same masks; use 0 and nn.Dropout on y.")
        if bidirectional:
            raise ConfigError(f"{name}(bidirectional=True): an agent cannot read later steps; use False.")
        if proj_size:
            raise ConfigError(f"{name}(proj_size={proj_size}) is not supported; use 0 and nn.Linear on y.")

    def _run_sequence(
        self, x: Any, state: Leaves | Tensor | None, first: Tensor | None, valid: Tensor | None
    ) -> tuple[Tensor, Leaves]:
        """Run a sequence `[T,B,D]`, or `[T,D]` without a batch; return the outputs and the leaves of the state."""
        is_batched = self._check_input(x)
        state = (state,) if isinstance(state, Tensor) else state
        self._check_types(x, state)
        if not is_batched:
            x, first, valid = (each if each is None else each.unsqueeze(self._batch_axis) for each in (x, first, valid))
            state = state if state is None else tuple(leaf.unsqueeze(1) for leaf in state)
        leaves = self._check_state(x, state)
        masks = [self._check_mask(x, name, mask) for name, mask in (("first", first), ("valid", valid))]
        leaves_BLH = [leaf.transpose(0, 1) for leaf in (detached(leaves) if self.detach else leaves)]
        x_BTD = x if self.batch_first else x.transpose(0, 1)
        if is_opaque():
            first = torch.zeros(x_BTD.shape[:2], dtype=torch.bool, device=x.device) if masks[0] is None else masks[0]
            y, after = self.run_reference(x_BTD, leaves_BLH, first, masks[1])
        elif x_BTD.shape[1] == 1:
            y, after = self.run(x_BTD[:, 0], leaves_BLH, *(mask if mask is None else mask[:, 0] for mask in masks))
            y = y[:, None]
        else:
            y, after = self.run(x_BTD, leaves_BLH, *masks)
        y = y if self.batch_first else y.transpose(0, 1)
        after = detached(after) if self.detach else after
        leaves = tuple(leaf.transpose(0, 1).contiguous() for leaf in after)
        if is_batched:
            return y, leaves
        return y.squeeze(self._batch_axis), tuple(leaf.squeeze(1) for leaf in leaves)

    @property
    def _batch_axis(self) -> int:
        return 0 if self.batch_first else 1

    @property
    def _time_axis(self) -> int:
        return 1 - self._batch_axis

    def _check_input(self, x: Any) -> bool:
        """Raise for an input of a wrong shape; return whether it has a batch axis."""
        size, axes = self.input_size, "[B,T," if self.batch_first else "[T,B,"
        if not isinstance(x, Tensor):
            raise ContractError(
                f"x is a {type(x).__name__}, must be a tensor {axes}{size}]; for padded steps use valid=."
            )
        if x.dim() not in (2, 3) or x.shape[-1] != size or not x.shape[self._time_axis if x.dim() == 3 else 0]:
            raise ContractError(f"x is {list(x.shape)}, must be {axes}{size}] or [T,{size}] with at least one step.")
        return x.dim() == 3

    def _check_types(self, x: Tensor, state: Leaves | None) -> None:
        dtype = next(self.parameters()).dtype
        for name, value in (("x", x), *(("The state", leaf) for leaf in state or ())):
            if value.dtype != dtype and not (value.is_floating_point() and is_autocast(value.device.type)):
                raise ContractError(f"{name} is {value.dtype}, the weights are {dtype}; convert it by .to({dtype}).")

    def _check_state(self, x: Tensor, state: Leaves | None) -> Leaves:
        size = (self.num_layers, x.shape[self._batch_axis], self.hidden_size)
        if state is None:
            zeros = torch.zeros(size, dtype=next(self.parameters()).dtype, device=x.device)
            return (zeros,) * len(self.state_keys)
        shapes = [list(leaf.shape) for leaf in state]
        if shapes != [list(size)] * len(self.state_keys):
            raise ContractError(
                f"The state is {shapes}, must be {[list(size)] * len(self.state_keys)}: layers, batch, hidden."
            )
        return state

    def _check_mask(self, x: Tensor, name: str, mask: Tensor | None) -> Tensor | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor):
            raise ContractError(f"{name} is a {type(mask).__name__}, must be a tensor.")
        if mask.shape != x.shape[:2]:
            raise ContractError(f"{name} is {list(mask.shape)}, must be {list(x.shape[:2])} as the first axes of x.")
        mask = mask if mask.dtype == torch.bool else mask != 0
        return mask if self.batch_first else mask.T


class _TorchRNN(RecurrentLayers, _Recurrent, nn.RNNBase):
    """`torch.nn.LSTM` or `torch.nn.GRU` by our layers: the same weights by the same names, and the same initial ones.

    Not a subclass of `torch.nn.LSTM`, which `torch.compile` refuses. `dropout`, `bidirectional` and `proj_size` are
    refused. `detach`: no gradient enters or leaves by the state. `kernel`: auto, torch or triton.
    """

    torch_mode: ClassVar[Literal["LSTM", "GRU"]]

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
        self._refuse(dropout, bidirectional, proj_size)
        nn.RNNBase.__init__(
            self, self.torch_mode, input_size, hidden_size, num_layers, bias, batch_first, device=device, dtype=dtype
        )
        self.detach, self.kernel = detach, kernel

    def torch_rnn(self) -> nn.RNNBase:
        """Return the module that has the weights: this one."""
        return self


@final
class LSTM(LSTMLayers, _TorchRNN):
    """`torch.nn.LSTM` that resets its state where `first` is true; the state is `(h, c)`."""

    torch_mode = "LSTM"

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: tuple[Tensor, Tensor] | None = None,
        first: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run a sequence; where `valid` is false the output is 0 and the state unchanged."""
        y, (h, c) = self._run_sequence(x, state, first, valid)
        return y, (h, c)


@final
class GRU(GRULayers, _TorchRNN):
    """`torch.nn.GRU` that resets its state where `first` is true."""

    torch_mode = "GRU"

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: Tensor | None = None,
        first: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a sequence; where `valid` is false the output is 0 and the state unchanged."""
        y, (h,) = self._run_sequence(x, state, first, valid)
        return y, h


@final
class MinLSTM(MinLSTMLayers, _Recurrent):
    """Stacked minLSTM layers, computed by a parallel scan, with the interface of `torch.nn.GRU`."""

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
    ) -> None:
        super().__init__()
        self._refuse(dropout, bidirectional, proj_size)
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.batch_first, self.detach = batch_first, detach
        self.gates = make_gates(input_size, hidden_size, num_layers, bias=bias).to(device, dtype)

    def forward(
        self,
        x: Tensor | PackedSequence,
        state: Tensor | None = None,
        first: Tensor | None = None,
        valid: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a sequence; where `valid` is false the output is 0 and the state unchanged."""
        y, (h,) = self._run_sequence(x, state, first, valid)
        return y, h
