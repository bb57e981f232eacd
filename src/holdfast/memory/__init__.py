"""What is remembered: pure cells, and the store of live states. Only this folder knows h and c."""

from holdfast.memory.bounds import saturation
from holdfast.memory.bundle import Bundle
from holdfast.memory.cell import Cell, select_rows
from holdfast.memory.choose import CELLS, find_cell, make_cell, register_cell, require_kernel, use_kernel
from holdfast.memory.gru import GRU
from holdfast.memory.lstm import LSTM, MemoryInit
from holdfast.memory.minlstm import MinLSTM
from holdfast.memory.none import NoMemory
from holdfast.memory.stack import Kernel
from holdfast.memory.store import LiveStore, Snapshot

__all__ = [
    "CELLS",
    "GRU",
    "LSTM",
    "Bundle",
    "Cell",
    "Kernel",
    "LiveStore",
    "MemoryInit",
    "MinLSTM",
    "NoMemory",
    "Snapshot",
    "find_cell",
    "make_cell",
    "register_cell",
    "require_kernel",
    "saturation",
    "select_rows",
    "use_kernel",
]
