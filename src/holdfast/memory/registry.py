"""The registry of cells and the choice of kernel."""

from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.memory.cell import Cell, NoMemory
from holdfast.memory.layers import Kernel
from holdfast.memory.minlstm import MinLSTM
from holdfast.memory.rnn import GRU, LSTM, StackedRNN
from holdfast.registry import Registry

CELLS: Registry[Cell] = Registry(
    "cell", "policy.memory=", "holdfast.cells", Cell, {"lstm": LSTM, "gru": GRU, "minlstm": MinLSTM, "none": NoMemory}
)
register_cell = CELLS.register
find_cell = CELLS.find


def make_cell(name: str, input_size: int, hidden_size: int, num_layers: int, init: str = "standard") -> Cell:
    """Build a registered cell; `init` applies to the LSTM."""
    options: dict[str, Any] = {} if init == "standard" else {"init": init}
    if options and name != "lstm":
        raise ConfigError(f"policy.memory_init={init} is for an LSTM; policy.memory is {name}.")
    return find_cell(name)(input_size, hidden_size, num_layers, **options)


def use_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Set the kernel of every LSTM and GRU in a module; `triton` without any is an error."""
    rnns = [submodule for submodule in module.modules() if isinstance(submodule, StackedRNN)]
    if kernel == "triton" and not rnns:
        raise ConfigError("policy.kernel=triton is for LSTM and GRU, and this policy has neither; use auto.")
    for rnn in rnns:
        rnn.kernel = kernel


def require_kernel(module: nn.Module, device: torch.device) -> None:
    """Raise if a kernel set by `use_kernel` cannot run on a device."""
    for submodule in module.modules():
        reason = submodule.refused_kernel(device) if isinstance(submodule, StackedRNN) else None
        if reason is not None:
            raise ConfigError(f"policy.kernel=triton: {reason}")
