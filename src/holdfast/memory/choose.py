"""Which memory a policy has: by name, by a package that registers one, or by `package.module:Class`."""

from typing import Any

from holdfast.errors import ConfigError
from holdfast.memory.cell import Cell
from holdfast.memory.gru import GRU
from holdfast.memory.lstm import LSTM
from holdfast.memory.minlstm import MinLSTM
from holdfast.memory.none import NoMemory
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
