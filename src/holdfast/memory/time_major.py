"""The LSTM as hand-written policies call it: time-major, state as a pair `(h, c)`, clears left for it."""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ContractError
from holdfast.memory.cell import Cell
from holdfast.memory.lstm import LSTM
from holdfast.memory.store import LiveStore
from holdfast.shapes import Bool, Float, Tensor

Pair = tuple[Float[Tensor, "L B H"], Float[Tensor, "L B H"]]


def to_pair(state: TensorDict) -> Pair:
    """Turn a batch-first state into `h, c` with the layers first."""
    h, c = (state[key].transpose(0, 1).clone(memory_format=torch.contiguous_format) for key in ("h", "c"))
    return h, c


def from_pair(h: Tensor, c: Tensor) -> TensorDict:
    """Turn `h, c` with the layers first into a batch-first state without a graph."""
    leaves = {"h": h.detach().transpose(0, 1), "c": c.detach().transpose(0, 1)}
    return TensorDict(leaves, batch_size=[h.shape[1]])


@final
class TimeMajorLSTM(nn.Module):
    """`y, (h, c) = lstm(x_TBD, (h, c))`, clearing where it was told to by `expect`.

    The clears of a call are left here by whoever fetched its state, and taken exactly once; the state
    after it must be stored. A call without clears, clears that nobody took and a state that nobody
    stored are errors rather than a memory that leaks.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self._expected: tuple[Tensor, Tensor | None] | None = None
        self._to_store = False

    def expect(self, clear_BT: Bool[Tensor, "B T"], valid_BT: Bool[Tensor, "B T"] | None) -> None:
        """Leave the clears of the coming call."""
        if self._to_store:
            self._to_store = False
            raise ContractError(
                "The state after the last call of self.lstm was never stored, so it would be forgotten. Call "
                "_store_lstm_state(h, c, env_id) after each call of self.lstm."
            )
        if self._expected is not None:
            self._expected = None
            raise ContractError(
                "_manage_lstm_state was called twice without a call of self.lstm between; the first "
                "call's episode starts would be lost. Call self.lstm(x, (h, c)) once after each."
            )
        self._expected = (clear_BT, valid_BT)

    def stored(self) -> None:
        """Hear that the state was stored; refuse if the last clears were not taken."""
        self._to_store = False
        if self._expected is not None:
            self._expected = None
            raise ContractError(
                "_store_lstm_state was called before self.lstm took this call's episode starts. "
                "Call self.lstm(x, (h, c)) between _manage_lstm_state and _store_lstm_state."
            )

    def forward(self, x_TBD: Float[Tensor, "T B D"], state: Pair) -> tuple[Tensor, Pair]:
        """Read a segment, or one step as T=1."""
        if not isinstance(self.cell, LSTM):
            raise ContractError(
                f"self.lstm(x, (h, c)) is for policies written by hand around an LSTM; this memory is a "
                f"{type(self.cell).__name__}. Inherit RecurrentPolicy for it."
            )
        if self._expected is None:
            raise ContractError(
                "self.lstm was called without episode starts. Call _manage_lstm_state before each "
                "call of self.lstm: it fetches the state and says where to clear."
            )
        (clear_BT, valid_BT), self._expected = self._expected, None
        self._to_store = True
        T, B = x_TBD.shape[:2]
        if clear_BT.shape != (B, T):
            raise ContractError(
                f"self.lstm got x with T={T}, B={B}, but this call has B={clear_BT.shape[0]} rows of "
                f"T={clear_BT.shape[1]} steps. x is time-major: [T, B, {self.cell.input_size}]."
            )
        if T == 1:
            valid_B = None if valid_BT is None else valid_BT[:, 0]
            y_BH, after = self.cell(x_TBD[0], from_pair(*state), clear_BT[:, 0], valid_B)
            return y_BH[None], to_pair(after)
        y_BTH, after = self.cell(x_TBD.transpose(0, 1), from_pair(*state), clear_BT, valid_BT)
        return y_BTH.transpose(0, 1), to_pair(after)


@final
class LeafBySlice(Mapping[int, Tensor]):
    """One leaf of the live store as a mapping from a slice's first agent to `[L,B,H]`."""

    def __init__(self, store: LiveStore, leaf: str) -> None:
        if leaf not in store.leaves:
            raise ContractError(
                f"This memory has no {leaf}; it remembers {', '.join(store.leaves) or 'nothing'}."
            )
        self._store, self._leaf = store, leaf

    def __getitem__(self, start: int) -> Tensor:
        if start not in self._store.slices:
            raise KeyError(start)
        return self._store.live(start)[self._leaf].transpose(0, 1)

    def __setitem__(self, start: int, value: Tensor) -> None:
        state = self._store.live(start, value.shape[1]).clone()
        state[self._leaf] = value.detach().transpose(0, 1)
        self._store.write(start, state)

    def __iter__(self) -> Iterator[int]:
        return iter(self._store.slices)

    def __len__(self) -> int:
        return len(self._store.slices)
