"""Memory cells, their registry and the choice of kernel.

Names are imported when they are first used: cells need tensordict, which takes longer to import than torch, and
`holdfast.nn` needs their layers alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.memory.cell import Cell, MultiCell, NoMemory, saturation, unit_values
    from holdfast.memory.layers import Kernel
    from holdfast.memory.minlstm import MinLSTM
    from holdfast.memory.registry import CELLS, find_cell, make_cell, register_cell, require_kernel, use_kernel
    from holdfast.memory.rnn import GRU, LSTM, MemoryInit
    from holdfast.memory.state_store import StateStore

__all__ = ["CELLS", "GRU", "LSTM", "Cell", "Kernel", "MemoryInit", "MinLSTM", "MultiCell", "NoMemory"]
__all__ += ["StateStore", "find_cell", "make_cell", "register_cell", "require_kernel", "saturation"]
__all__ += ["unit_values", "use_kernel"]

_MODULES = {
    "cell": ("Cell", "MultiCell", "NoMemory", "saturation", "unit_values"),
    "layers": ("Kernel",),
    "minlstm": ("MinLSTM",),
    "registry": ("CELLS", "find_cell", "make_cell", "register_cell", "require_kernel", "use_kernel"),
    "rnn": ("GRU", "LSTM", "MemoryInit"),
    "state_store": ("StateStore",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"holdfast.memory.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
