"""Which memory a policy has: by name, by a package that registers one, or by `package.module:Class`."""

from typing import Any

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.memory.cell import Cell
from holdfast.memory.gru import GRU
from holdfast.memory.lstm import LSTM
from holdfast.memory.minlstm import MinLSTM
from holdfast.memory.none import NoMemory
from holdfast.memory.stack import Kernel, Stack
from holdfast.named import Registry

CELLS: Registry[Cell] = Registry(
    "memory",
    "policy.memory=",
    "holdfast.cells",
    Cell,
    {"lstm": LSTM, "gru": GRU, "minlstm": MinLSTM, "none": NoMemory},
)
register_cell = CELLS.register
find_cell = CELLS.find


def make_cell(name: str, input_size: int, hidden_size: int, num_layers: int, init: str = "standard") -> Cell:
    """Build a cell; `init` is the LSTM's."""
    options: dict[str, Any] = {}
    if init != "standard":
        if name != "lstm":
            raise ConfigError(f"policy.memory_init={init} is for an LSTM; policy.memory is {name}.")
        options["init"] = init
    return find_cell(name)(input_size, hidden_size, num_layers, **options)


def use_kernel(module: nn.Module, kernel: Kernel) -> None:
    """Say what runs every LSTM and GRU inside a module; `triton` where there is none of them is refused."""
    stacks = [part for part in module.modules() if isinstance(part, Stack)]
    if kernel == "triton" and not stacks:
        raise ConfigError("policy.kernel=triton is for LSTM and GRU, and this policy has neither; use auto.")
    for stack in stacks:
        stack.kernel = kernel


def require_kernel(module: nn.Module, device: torch.device) -> None:
    """Refuse a kernel that was asked for and cannot run there."""
    for part in module.modules():
        refused = part.refused_kernel(device) if isinstance(part, Stack) else None
        if refused is not None:
            raise ConfigError(f"policy.kernel=triton: {refused}")
