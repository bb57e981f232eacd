"""The LSTM for hand-written policies: time-major, state as a pair `(h, c)`, resets set beforehand."""

from collections.abc import Iterator, Mapping
from typing import final

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ContractError
from holdfast.memory.cell import Cell
from holdfast.memory.rnn import LSTM
from holdfast.memory.state_store import StateStore
from holdfast.types import Bool, Float, Tensor

Pair = tuple[Float[Tensor, "L B H"], Float[Tensor, "L B H"]]


def to_pair(state: TensorDict) -> Pair:
    """Convert a batch-first state to `h, c` with the layers first."""
    h, c = (state[key].transpose(0, 1).clone(memory_format=torch.contiguous_format) for key in ("h", "c"))
    return h, c


def from_pair(h: Tensor, c: Tensor) -> TensorDict:
    """Convert `h, c` with the layers first to a detached batch-first state."""
    leaves = {"h": h.detach().transpose(0, 1), "c": c.detach().transpose(0, 1)}
    return TensorDict(leaves, batch_size=[h.shape[1]])


@final
class ManualLSTM(nn.Module):
    """`y, (h, c) = lstm(x_TBD, (h, c))`, with the resets that `set_resets` passed.

    Each call consumes the resets of one `set_resets` call, and its state must be stored afterwards.
    A call without resets, unused resets and an unstored state are errors: each is a memory leak.
    """

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.cell = cell
        self._resets: tuple[Tensor, Tensor | None] | None = None
        self._to_store = False

    def set_resets(self, clear_BT: Bool[Tensor, "B T"], valid_BT: Bool[Tensor, "B T"] | None) -> None:
        """Set the episode starts of the next call."""
        if self._to_store:
            self._to_store = False
            raise ContractError(
                "The state after the last call of self.lstm was never stored and would be lost. Call "
                "_store_lstm_state(h, c, env_id) after each call of self.lstm."
            )
        if self._resets is not None:
            self._resets = None
            raise ContractError(
                "_manage_lstm_state was called twice without a call of self.lstm between; the first "
                "call's episode starts would be lost. Call self.lstm(x, (h, c)) once after each."
            )
        self._resets = (clear_BT, valid_BT)

    def mark_stored(self) -> None:
        """Record that the state was stored; raise if the last resets were not used."""
        self._to_store = False
        if self._resets is not None:
            self._resets = None
            raise ContractError(
                "_store_lstm_state was called before self.lstm used this call's episode starts. "
                "Call self.lstm(x, (h, c)) between _manage_lstm_state and _store_lstm_state."
            )

    def forward(self, x_TBD: Float[Tensor, "T B D"], state: Pair) -> tuple[Tensor, Pair]:
        """Process a segment, or one step as T=1."""
        if not isinstance(self.cell, LSTM):
            raise ContractError(
                f"self.lstm(x, (h, c)) is for policies written by hand around an LSTM; this memory is a "
                f"{type(self.cell).__name__}. Inherit RecurrentPolicy for it."
            )
        if self._resets is None:
            raise ContractError(
                "self.lstm was called without episode starts. Call _manage_lstm_state before each "
                "call of self.lstm: it reads the state and sets the resets."
            )
        (clear_BT, valid_BT), self._resets = self._resets, None
        self._to_store = True
        T, B = x_TBD.shape[:2]
        if clear_BT.shape != (B, T):
            raise ContractError(
                f"self.lstm got x with T={T}, B={B}, but the resets are of B={clear_BT.shape[0]} rows of "
                f"T={clear_BT.shape[1]} steps. x is time-major: [T, B, {self.cell.input_size}]."
            )
        if T == 1:
            valid_B = None if valid_BT is None else valid_BT[:, 0]
            y_BH, after = self.cell(x_TBD[0], from_pair(*state), clear_BT[:, 0], valid_B)
            return y_BH[None], to_pair(after)
        y_BTH, after = self.cell(x_TBD.transpose(0, 1), from_pair(*state), clear_BT, valid_BT)
        return y_BTH.transpose(0, 1), to_pair(after)


@final
class StateView(Mapping[int, Tensor]):
    """One leaf of the state store as a mapping from a slice's first agent to `[L,B,H]`."""

    def __init__(self, store: StateStore, leaf: str) -> None:
        if leaf not in store.state_keys:
            raise ContractError(f"This memory has no {leaf}; it has {', '.join(store.state_keys) or 'no leaves'}.")
        self._store, self._leaf = store, leaf

    def __getitem__(self, start: int) -> Tensor:
        if start not in self._store.slices:
            raise KeyError(start)
        return self._store.view(start)[self._leaf].transpose(0, 1)

    def __setitem__(self, start: int, value: Tensor) -> None:
        state = self._store.view(start, value.shape[1]).clone()
        state[self._leaf] = value.detach().transpose(0, 1)
        self._store.write(start, state)

    def __delitem__(self, start: int) -> None:
        """Reset one slice: its next call starts from zeros."""
        self[start] = torch.zeros_like(self[start])

    def clear(self) -> None:
        """Reset all slices."""
        for start in self:
            del self[start]

    def __iter__(self) -> Iterator[int]:
        return iter(self._store.slices)

    def __len__(self) -> int:
        return len(self._store.slices)
