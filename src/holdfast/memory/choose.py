"""Which memory a policy has: by name, by a package that registers one, or by `package.module:Class`."""

from importlib.metadata import entry_points
from typing import Any

from holdfast.errors import ConfigError, did_you_mean
from holdfast.memory.cell import Cell
from holdfast.memory.gru import GRU
from holdfast.memory.lstm import LSTM
from holdfast.memory.minlstm import MinLSTM
from holdfast.memory.none import NoMemory
from holdfast.named import find_named

CELLS: dict[str, type[Cell]] = {"lstm": LSTM, "gru": GRU, "minlstm": MinLSTM, "none": NoMemory}
GROUP = "holdfast.cells"
"""The entry points by which other packages add cells."""


def register_cell(name: str, cell: type[Cell]) -> None:
    """Add a cell under a name; one that is taken is refused."""
    if name in CELLS and CELLS[name] is not cell:
        raise ConfigError(f"There is a memory called {name} already; choose another name.")
    CELLS[name] = cell


def find_cell(name: str) -> type[Cell]:
    """Find a cell's class."""
    if name in CELLS:
        return CELLS[name]
    if ":" in name:
        found = find_named(name, "policy.memory=")
    else:
        registered = {point.name: point for point in entry_points(group=GROUP)}
        if name not in registered:
            there = sorted({*CELLS, *registered})
            meant = did_you_mean(name, there, f"there is {', '.join(there)}.")
            raise ConfigError(f"There is no memory {name!r}; {meant} Your own goes by package.module:Class.")
        found = registered[name].load()
    if not (isinstance(found, type) and issubclass(found, Cell)):
        raise ConfigError(f"policy.memory={name}: {found!r} is not a subclass of holdfast.memory.Cell.")
    return found


def make_cell(name: str, input_size: int, hidden_size: int, num_layers: int, init: str = "standard") -> Cell:
    """Build a cell; `init` is the LSTM's."""
    options: dict[str, Any] = {}
    if init != "standard":
        if name != "lstm":
            raise ConfigError(f"policy.memory_init={init} is for an LSTM; policy.memory is {name}.")
        options["init"] = init
    return find_cell(name)(input_size, hidden_size, num_layers, **options)
