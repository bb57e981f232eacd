"""The hidden states of all agents between calls; nothing else stores states."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.memory.cell import Cell
from holdfast.state_tree import get_field, get_tensor_like
from holdfast.types import Tensor


@dataclass(frozen=True)
class Snapshot:
    """A copy of the store: its slices and states."""

    slices: dict[int, int]
    tree: TensorDict

    def as_tree(self) -> dict[str, Any]:
        """Return a plain dictionary for a checkpoint."""
        return {"slices": self.slices, "leaves": {str(key): leaf for key, leaf in self.tree.items()}}


@final
class StateStore:
    """One tree `[A,...]` indexed by agent; a slice (first agent, length) is a view of it.

    A collector or player allocates its slices; after that an unknown or overlapping slice, another size, device or
    dtype is an error. Without `allocate`, a slice is added at the initial state on first use. `write` copies and
    detaches. Within `replaying(entry)`, `read` returns the entry state and `write` does nothing, so an update or a
    bootstrap value leaves the live states unchanged.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._slices: dict[int, int] = {}
        self.allocated = False
        """Whether `allocate` fixed the slices; if not, they are added on first use."""
        self._tree = cell.initial(0)
        self._entry: TensorDict | None = None
        self._scratch = False

    def __reduce__(self) -> tuple[type["StateStore"], tuple[Cell]]:
        """Copy and pickle as an empty store: states are not weights."""
        return StateStore, (self._cell,)

    @property
    def state_keys(self) -> list[str]:
        """Names of the state leaves."""
        return [str(key) for key, _ in self._cell.initial(0).items()]

    @property
    def slices(self) -> Mapping[int, int]:
        """Length of every slice by its first agent."""
        return dict(self._slices)

    @property
    def is_replaying(self) -> bool:
        """Whether `read` returns a replayed entry state."""
        return self._entry is not None

    @property
    def is_live(self) -> bool:
        """Whether reads and writes reach the live states: neither a replay nor scratch states."""
        return self._entry is None and not self._scratch

    def allocate(self, slices: Mapping[int, int]) -> None:
        """Fix the slices, each at the initial state; all earlier states are dropped."""
        self._refuse_in_replay("allocate slices")
        self._slices, self._tree = {}, self._cell.initial(0)
        for start, length in sorted(slices.items()):
            self._add(start, length)
        self.allocated = True

    def close(self) -> None:
        """Drop all slices; slices are again added on first use."""
        self._refuse_in_replay("close")
        self._slices, self._tree, self.allocated = {}, self._cell.initial(0), False

    def view(self, start: int, length: int | None = None) -> TensorDict:
        """Return a view of the live states of a slice, also within a replay."""
        length = self._slices[start] if length is None else length
        if start not in self._slices and not self.allocated:
            self._add(start, length)
        if self._slices.get(start) != length:
            raise ContractError(
                f"There is no slice of {length} agents at agent {start}; {self._describe_slices()}. "
                "Allocate it first, or reset the memory before using another size."
            )
        return self._tree if length == len(self._tree) else self._tree[start : start + length]

    def read(self, start: int, length: int) -> TensorDict:
        """Return the states of a slice."""
        if self._entry is not None:
            if len(self._entry) != length:
                raise ContractError(
                    f"The replayed entry state has {len(self._entry)} rows, the batch {length}; "
                    "pass `replay` the entry states of exactly these rows."
                )
            return self._entry
        state = self.view(start, length)
        # With gradients on, autograd may need these values after the next write: return a copy.
        return state.clone() if torch.is_grad_enabled() else state

    def write(self, start: int, state: TensorDict) -> None:
        """Copy `state`, detached, into a slice."""
        if self._entry is not None:
            return
        leaves = [(key, state[key], leaf) for key, leaf in self.view(start, len(state)).items()]
        for key, new, leaf in leaves:
            _require_same(f"Memory {key!r} of the slice at agent {start}", new, leaf)
        with torch.no_grad():
            for _, new, leaf in leaves:
                leaf.copy_(new)

    def reset(self) -> None:
        """Reset all states; allocated slices stay, others are dropped."""
        if self.allocated:
            self.allocate(self._slices)
        else:
            self.close()

    def reset_slice(self, start: int, agents: Tensor | list[int] | None = None) -> None:
        """Reset one slice, or some of its agents (counted from the slice's first)."""
        if start not in self._slices:
            raise ContractError(f"No slice starts at agent {start}; {self._describe_slices()}.")
        view = self.view(start)
        rows = torch.arange(len(view)) if agents is None else torch.as_tensor(agents, device="cpu")
        if rows.dtype == torch.bool and rows.shape != (len(view),):
            raise ContractError(f"agents is a mask {list(rows.shape)}; the slice at agent {start} needs [{len(view)}].")
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.long()
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(view):
            raise ContractError(
                f"agents={rows.tolist()} is out of range; the slice at agent {start} has agents "
                f"0..{len(view) - 1}, counted from its first."
            )
        fresh = self._cell.initial(len(rows))
        for key, leaf in view.items():
            leaf[rows.to(leaf.device)] = fresh[key]

    def snapshot(self) -> Snapshot:
        """Return a copy of all states."""
        return Snapshot(dict(self._slices), self._tree.clone())

    def restore_tree(self, saved: Any) -> None:
        """Restore the states that `Snapshot.as_tree` saved."""
        leaves = get_field(saved, "leaves", dict)
        if set(leaves) != set(self.state_keys):
            raise ContractError(f"The saved state has leaves {sorted(leaves)}, this memory {sorted(self.state_keys)}.")
        # By agent, not by slice: a teacher's slices may differ from the saved ones.
        initial = self._cell.initial(agents := len(self._tree))
        tree = {name: get_tensor_like(leaves, name, initial.get(name)) for name in self.state_keys}
        self.restore(Snapshot(dict(self._slices), TensorDict(tree, batch_size=[agents])))

    def restore(self, snapshot: Snapshot) -> None:
        """Restore a snapshot; allocated slices must be the same."""
        self._refuse_in_replay("restore")
        if self.allocated and snapshot.slices != self._slices:
            raise ContractError(
                f"The snapshot has slices {snapshot.slices}, this store {self._slices}; allocate the same slices first."
            )
        for key, leaf in self._cell.initial(len(snapshot.tree)).items():
            _require_same(f"Memory {key!r} of the snapshot", snapshot.tree[key], leaf, device=False)
        self._slices = dict(snapshot.slices)
        self._tree = snapshot.tree.detach().clone().to(next(self._cell.parameters()).device)

    @contextmanager
    def replaying(self, entry: TensorDict) -> Iterator[None]:
        """Within this context, `read` returns `entry` and `write` does nothing."""
        if self._entry is not None:
            raise ContractError("A replay is already open; leave its `with` block before the next one.")
        self._entry = entry.detach() if entry.requires_grad else entry
        try:
            yield
        finally:
            self._entry = None

    @contextmanager
    def scratch(self, length: int) -> Iterator[None]:
        """Within this context, use temporary states of `length` agents; the live ones return on exit."""
        self._refuse_in_replay("use scratch states")
        before = self._slices, self._tree, self.allocated, self._scratch
        self._scratch = True
        self.allocate({0: length})
        try:
            yield
        finally:
            self._slices, self._tree, self.allocated, self._scratch = before

    @contextmanager
    def subset(self, rows: slice | Tensor) -> Iterator[None]:
        """Within this context, only these agents exist, as a slice at 0; their new states are kept.

        A `slice` is a view; other rows are gathered, and scattered back unless an exception is raised.
        """
        self._refuse_in_replay("select agents")
        before = self._slices, self._tree
        all_agents = cast("TensorDict", self._tree)
        self._tree = cast("TensorDict", all_agents[rows])
        self._slices = {0: len(self._tree)}
        try:
            yield
            if not isinstance(rows, slice):
                with torch.no_grad():
                    for key, leaf in all_agents.items():
                        leaf[rows] = self._tree[key]
        finally:
            self._slices, self._tree = before

    def _refuse_in_replay(self, action: str) -> None:
        if self._entry is not None:
            raise ContractError(f"Cannot {action} within a replay; leave its `with` block first.")

    def _add(self, start: int, length: int) -> None:
        for other_start, other_length in self._slices.items():
            if start < other_start + other_length and other_start < start + length:
                raise ContractError(
                    f"A slice of {length} agents at agent {start} overlaps the one of {other_length} at "
                    f"agent {other_start}; slices must not share states. {self._describe_slices()}."
                )
        if length < 1 or start < 0:
            raise ContractError(
                f"A slice of {length} agents at agent {start} is invalid; give at least 1 agent, from agent 0 on."
            )
        missing = start + length - len(self._tree)
        if missing > 0:
            self._tree = torch.cat([self._tree, self._cell.initial(missing)])  # pyright: ignore
        self._slices[start] = length

    def _describe_slices(self) -> str:
        listed = ", ".join(f"{length} agents at {start}" for start, length in sorted(self._slices.items()))
        return f"slices: {listed}" if listed else "there are no slices"


def _require_same(name: str, new: Any, old: Any, *, device: bool = True) -> None:
    same = new.shape == old.shape and new.dtype == old.dtype
    if not same or (device and new.device != old.device):
        before, after = (f"{list(leaf.shape)} {leaf.dtype} on {leaf.device}" for leaf in (old, new))
        raise ContractError(
            f"{name} was {before}; the new state is {after}. Keep one size, dtype and device, or allocate the slices "
            "again after moving the policy."
        )
