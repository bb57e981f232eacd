"""Comparisons of tensors with bounds, and row operations on state trees."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.check.results import Measurement
from holdfast.errors import ContractError
from holdfast.monitor.replay_check import BF16_BOUND, RoundingBound
from holdfast.types import Bool, Tensor

BOUND: dict[torch.dtype, float | RoundingBound] = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: BF16_BOUND}
SHORT = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16"}
AXES = ("agent", "step")


@torch.no_grad()
def expect_zero(what: str, diff: Tensor, *axes: str, columns: list[str] | None = None, path: str = "") -> Measurement:
    """Require exact zeros; the finding names the first other entry by its axes, and its last index by `columns`."""
    diff = diff.abs()
    size = float(diff.max()) if diff.numel() else 0.0
    finding = f"{_location(diff, axes, columns)} changes by up to {size:.1e}, must be 0"
    return Measurement(what, size, 0.0, finding=finding, path=path)


@torch.no_grad()
def expect_close(
    what: str,
    actual: Tensor,
    expected: Tensor,
    bound: float | RoundingBound,
    *,
    columns: list[str] | None = None,
    path: str = "",
) -> Measurement:
    """Require that two tensors are equal to within `bound * max(1, |x|)`."""
    error = (actual - expected).abs() / expected.abs().max().clamp(min=1)
    if isinstance(bound, RoundingBound):
        which, size, limit = bound.worst(error)
        detail = f"is off by {size:.1e} {which}"
    else:
        size, limit = float(error.max()), bound
        detail = f"is off by up to {size:.1e}"
    excess = torch.where(error <= limit, 0.0, error)
    finding = f"{_location(excess, AXES, columns)} {detail}, allowed {limit:.0e}"
    return Measurement(what, size, limit, finding=finding, path=path)


def expect_nonzero(what: str, size: float, finding: str, path: str = "") -> Measurement:
    """Require that a number is greater than zero."""
    return Measurement(what, size, 0.0, "more than", finding, path)


def _location(diff: Tensor, axes: tuple[str, ...], columns: list[str] | None) -> str:
    """Name the first nonzero entry, or the first entry if all are zero."""
    if not diff.numel():
        return "nothing"
    nonzero = (diff != 0).nonzero()
    index = nonzero[0].tolist() if len(nonzero) else [0] * diff.dim()
    names = [f"{axis} {at}" for axis, at in zip(axes, index, strict=False)]
    if columns is not None:
        names.append(columns[index[-1]])
    return ", ".join(names)


State = Any
"""A tree of tensors: tensors, tuples, lists, dictionaries, named tuples, nested in any way."""


def register_dataclasses(state: State) -> State:
    """Let PyTorch see into a state's dataclasses, and return the state."""
    for leaf in pytree.tree_leaves(state):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            pytree.register_dataclass(type(leaf))
            register_dataclasses(state)
            break
    return state


def state_leaves(state: State) -> list[Tensor]:
    """List a state's tensors."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def has_plain_numbers(state: State) -> bool:
    """Whether a state holds numbers that are no tensors."""
    return any(isinstance(leaf, int | float) for leaf in pytree.tree_leaves(state))


def clone_state(state: State) -> State:
    """Copy a state, without its graph."""
    with torch.no_grad():
        return pytree.tree_map_only(Tensor, torch.clone, state)


def named_leaves(state: State) -> dict[str, Tensor]:
    """Return a state's tensors by their paths in the tree."""
    pairs, _ = pytree.tree_flatten_with_path(state)
    return {pytree.keystr(path) or "state": leaf for path, leaf in pairs if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class RowAxes:
    """The batch axis of each tensor of a state."""

    axes: tuple[int, ...]

    @staticmethod
    def infer(two: State, three: State) -> "RowAxes":
        """Find the axes from initial states of 2 and 3 rows."""
        axes = []
        for (name, small), large in zip(named_leaves(two).items(), state_leaves(three), strict=True):
            pairs = zip(small.shape, large.shape, strict=True)
            differ = [axis for axis, (size, larger) in enumerate(pairs) if size != larger]
            if len(differ) != 1:
                raise ContractError(
                    f"The initial {name} is {list(small.shape)} for 2 rows and {list(large.shape)} for 3; "
                    "exactly one axis must count the rows."
                )
            axes.append(differ[0])
        return RowAxes(tuple(axes))

    def pick(self, state: State, rows: Tensor) -> State:
        """Select rows by index."""
        return with_leaves(state, [leaf.index_select(axis, rows.to(leaf.device)) for leaf, axis in self._pairs(state)])

    def where(self, mask: Bool[Tensor, " B"], new: State, old: State) -> State:
        """Take rows of `new` where the mask is true and rows of `old` elsewhere."""
        pairs = zip(self._pairs(old), state_leaves(new), strict=True)
        leaves = [torch.where(broadcast(mask, axis, leaf), other, leaf) for (leaf, axis), other in pairs]
        return with_leaves(old, leaves)

    def cat(self, states: Sequence[State]) -> State:
        """Concatenate the rows of several states."""
        columns = zip(*(state_leaves(state) for state in states), strict=True)
        leaves = [torch.cat(tensors, dim=axis) for tensors, axis in zip(columns, self.axes, strict=True)]
        return with_leaves(states[0], leaves)

    def _pairs(self, state: State) -> list[tuple[Tensor, int]]:
        return list(zip(state_leaves(state), self.axes, strict=True))


def with_leaves(state: State, tensors: Sequence[Tensor]) -> State:
    """Replace a state's tensors, in order."""
    remaining = iter(tensors)
    return pytree.tree_map_only(Tensor, lambda _: next(remaining), state)


def broadcast(mask: Bool[Tensor, " n"], axis: int, like: Tensor) -> Bool[Tensor, "..."]:
    """Reshape a mask so that it broadcasts along one axis of a tensor."""
    return mask.to(like.device).reshape([-1 if dim == axis else 1 for dim in range(like.dim())])
