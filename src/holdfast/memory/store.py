"""The live store: what every agent remembers between calls. The only place that keeps states."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.memory.cell import Cell
from holdfast.saved import taken, tensor_like
from holdfast.shapes import Tensor


@dataclass(frozen=True)
class Snapshot:
    """The live memories at one moment: which slices there were, and a copy of the tree."""

    slices: dict[int, int]
    tree: TensorDict

    def as_tree(self) -> dict[str, Any]:
        """Write it as a plain tree, to be saved."""
        return {"slices": self.slices, "leaves": {str(key): leaf for key, leaf in self.tree.items()}}


@final
class LiveStore:
    """One tree `[A,...]` indexed by agent; a slice (first agent, length) is a view of it.

    A collector or player opens its slices; after that an unknown or overlapping slice, another size,
    device or dtype is an error. A store used by hand opens a new slice at the initial state.
    Writing copies and cuts the graph. Within `replaying(entry)` reads give the entry and writes do
    nothing, so an update or a look at a value leaves the live memories alone.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._slices: dict[int, int] = {}
        self._opened = False
        self._tree = cell.initial(0)
        self._entry: TensorDict | None = None
        self._aside = False

    def __reduce__(self) -> tuple[type["LiveStore"], tuple[Cell]]:
        """Copy and pickle as an empty store: memories are not weights."""
        return LiveStore, (self._cell,)

    @property
    def leaves(self) -> list[str]:
        """The names of what is remembered."""
        return [str(key) for key, _ in self._cell.initial(0).items()]

    @property
    def slices(self) -> Mapping[int, int]:
        """First agent and length of every slice."""
        return dict(self._slices)

    @property
    def declared(self) -> bool:
        """Whether somebody opened the slices; if not, they open as they are used."""
        return self._opened

    @property
    def is_replaying(self) -> bool:
        """Whether reads now give a replayed entry state."""
        return self._entry is not None

    @property
    def is_living(self) -> bool:
        """Whether reads and writes are those of the agents that live: no replay, nobody aside."""
        return self._entry is None and not self._aside

    def open(self, slices: Mapping[int, int]) -> None:
        """Declare the slices there will be, each at the initial state; everything before is forgotten."""
        self._refuse_in_replay("open slices")
        self._slices, self._tree = {}, self._cell.initial(0)
        for start, length in sorted(slices.items()):
            self._add(start, length)
        self._opened = True

    def close(self) -> None:
        """Forget all slices; the store may be used by hand again."""
        self._refuse_in_replay("forget")
        self._slices, self._tree, self._opened = {}, self._cell.initial(0), False

    def live(self, start: int, length: int | None = None) -> TensorDict:
        """Look at the live memories of a slice, also from within a replay; a view, not a copy."""
        return self._view(start, self._slices[start] if length is None else length)

    def read(self, start: int, length: int) -> TensorDict:
        """Return what the agents of a slice remember."""
        if self._entry is not None:
            if len(self._entry) != length:
                raise ContractError(
                    f"The replayed entry state holds {len(self._entry)} rows, the batch {length}; "
                    "give `replay` the entry states of exactly these rows."
                )
            return self._entry
        state = self._view(start, length)
        # With gradients on, autograd may need these numbers after the next write: hand out a copy.
        return state.clone() if torch.is_grad_enabled() else state

    def write(self, start: int, state: TensorDict) -> None:
        """Remember a copy of `state`, without its graph, for the agents of a slice."""
        if self._entry is not None:
            return
        view = self._view(start, len(state))
        for key, old in view.items():
            new = state[key]
            _require_same(f"Memory {key!r} of the slice at agent {start}", new, old)
        with torch.no_grad():
            view.update_(state.detach())

    def reset(self) -> None:
        """Make everybody forget; slices opened by hand are gone, declared ones stay."""
        if self._opened:
            self.open(self._slices)
        else:
            self.close()

    def reset_slice(self, start: int, agents: Tensor | list[int] | None = None) -> None:
        """Make one slice forget, or only some of its agents (counted from the slice's first)."""
        if start not in self._slices:
            raise ContractError(f"No slice starts at agent {start}; {self._tell_slices()}.")
        view = self._view(start, self._slices[start])
        rows = torch.arange(len(view)) if agents is None else torch.as_tensor(agents, device="cpu")
        if rows.dtype == torch.bool and rows.shape != (len(view),):
            raise ContractError(f"A mask of {tuple(rows.shape)} does not fit {len(view)} agents.")
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.long()
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(view):
            raise ContractError(
                f"The slice at agent {start} has agents 0..{len(view) - 1}, counted from its first; "
                f"asked to reset {rows.tolist()}."
            )
        fresh = self._cell.initial(len(rows))
        for key, leaf in view.items():
            leaf[rows.to(leaf.device)] = fresh[key]

    def snapshot(self) -> Snapshot:
        """Copy all live memories."""
        return Snapshot(dict(self._slices), self._tree.clone())

    def restore_tree(self, saved: Any) -> None:
        """Bring back memories from what was saved of a snapshot."""
        leaves = taken(saved, "leaves", dict)
        if set(leaves) != set(self.leaves):
            raise ContractError(f"What was saved remembers {sorted(leaves)}, this memory {self.leaves}.")
        # By agent: slices are views, and those of a teacher may be cut otherwise than before.
        mine = self._cell.initial(agents := len(self._tree))
        tree = {name: tensor_like(leaves, name, mine.get(name)) for name in self.leaves}
        self.restore(Snapshot(dict(self._slices), TensorDict(tree, batch_size=[agents])))

    def restore(self, snapshot: Snapshot) -> None:
        """Bring back copied memories; declared slices must be the same ones."""
        self._refuse_in_replay("restore")
        if self._opened and snapshot.slices != self._slices:
            raise ContractError(
                f"The snapshot has slices {snapshot.slices}, this store {self._slices}; "
                "open the same slices before restoring."
            )
        mine = self._cell.initial(len(snapshot.tree))
        for key, leaf in mine.items():
            _require_same(f"Memory {key!r} of the snapshot", snapshot.tree[key], leaf, device=False)
        self._slices = dict(snapshot.slices)
        self._tree = snapshot.tree.detach().clone().to(next(self._cell.parameters()).device)

    @contextmanager
    def replaying(self, entry: TensorDict) -> Iterator[None]:
        """Let calls inside read `entry` and write nothing."""
        if self._entry is not None:
            raise ContractError("A replay is already open; close it before the next one.")
        self._entry = entry.detach()
        try:
            yield
        finally:
            self._entry = None

    @contextmanager
    def aside(self, length: int) -> Iterator[None]:
        """Let calls inside live with memories of their own, for so many agents; the live ones come back."""
        self._refuse_in_replay("step aside")
        before = self._slices, self._tree, self._opened, self._aside
        self._aside = True
        self.open({0: length})
        try:
            yield
        finally:
            self._slices, self._tree, self._opened, self._aside = before

    @contextmanager
    def among(self, rows: slice | Tensor) -> Iterator[None]:
        """Let calls inside live as some of the agents, a slice at 0; what they remember becomes theirs.

        A slice of agents is a view; others are gathered, and scattered back unless something is raised.
        """
        self._refuse_in_replay("live as some of the agents")
        before = self._slices, self._tree
        whole = cast("TensorDict", self._tree)
        self._tree = cast("TensorDict", whole[rows])
        self._slices = {0: len(self._tree)}
        try:
            yield
            if not isinstance(rows, slice):
                with torch.no_grad():
                    for key, leaf in whole.items():
                        leaf[rows] = self._tree[key]
        finally:
            self._slices, self._tree = before

    def _refuse_in_replay(self, what: str) -> None:
        if self._entry is not None:
            raise ContractError(f"Cannot {what} within a replay: it leaves the live memories alone.")

    def _view(self, start: int, length: int) -> TensorDict:
        if start not in self._slices and not self._opened:
            self._add(start, length)
        if self._slices.get(start) != length:
            raise ContractError(
                f"There is no slice of {length} agents at agent {start}; {self._tell_slices()}. "
                "Open it first, or reset the memory before using another size."
            )
        return self._tree[start : start + length]

    def _add(self, start: int, length: int) -> None:
        for other, its_length in self._slices.items():
            if start < other + its_length and other < start + length:
                raise ContractError(
                    f"A slice of {length} agents at agent {start} overlaps the one of {its_length} at "
                    f"agent {other}; two slices would share memories. {self._tell_slices()}."
                )
        if length < 1 or start < 0:
            raise ContractError(f"A slice of {length} agents at agent {start} cannot be.")
        missing = start + length - len(self._tree)
        if missing > 0:
            self._tree = torch.cat([self._tree, self._cell.initial(missing)])  # pyright: ignore
        self._slices[start] = length

    def _tell_slices(self) -> str:
        if not self._slices:
            return "no slices are open"
        listed = (f"{length} agents at {start}" for start, length in sorted(self._slices.items()))
        return "open slices: " + ", ".join(listed)


def _require_same(what: str, new: Any, old: Any, *, device: bool = True) -> None:
    same = new.shape == old.shape and new.dtype == old.dtype
    if not same or (device and new.device != old.device):
        raise ContractError(
            f"{what} was {_describe(old)}; the new state is {_describe(new)}. Keep one size, dtype and "
            "device, or open the slices again after moving the policy."
        )


def _describe(leaf: Any) -> str:
    return f"{list(leaf.shape)} {leaf.dtype} on {leaf.device}"
