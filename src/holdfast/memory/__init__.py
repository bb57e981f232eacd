"""What is remembered: pure cells, and the store of live states. Only this folder knows h and c."""

from holdfast.memory.cell import Cell, select_rows
from holdfast.memory.lstm import LSTM, MemoryInit
from holdfast.memory.store import LiveStore, Snapshot

__all__ = ["LSTM", "Cell", "LiveStore", "MemoryInit", "Snapshot", "select_rows"]
