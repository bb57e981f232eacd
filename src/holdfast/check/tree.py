"""States as trees: whoever's they are, their rows can be picked, replaced and told apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Tensor

State = Any
"""A tree of tensors: tensors, tuples, lists, dictionaries, named tuples, in any order."""


def leaves(state: State) -> list[Tensor]:
    """List a state's tensors."""
    return [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]


def copied(state: State) -> State:
    """Copy a state, without its graph."""
    with torch.no_grad():
        return pytree.tree_map_only(Tensor, torch.clone, state)


def names_of(state: State) -> list[str]:
    """Name each tensor of a state by its way through the tree."""
    pairs, _ = pytree.tree_flatten_with_path(state)
    return [pytree.keystr(path) or "state" for path, leaf in pairs if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Rows:
    """Knows which axis of each tensor of a state counts its rows."""

    axes: tuple[int, ...]

    @staticmethod
    def learn(few: State, more: State) -> "Rows":
        """Find the axes from two initial states of different sizes."""
        axes = []
        for name, small, large in zip(names_of(few), leaves(few), leaves(more), strict=True):
            differ = [
                axis
                for axis, sizes in enumerate(zip(small.shape, large.shape, strict=True))
                if sizes[0] != sizes[1]
            ]
            if len(differ) != 1:
                raise ContractError(
                    f"The initial {name} is {list(small.shape)} for 2 rows and {list(large.shape)} for 3; "
                    "exactly one axis must count the rows."
                )
            axes.append(differ[0])
        return Rows(tuple(axes))

    def pick(self, state: State, rows: Tensor) -> State:
        """Take some rows, in some order."""
        return rebuilt(
            state, [leaf.index_select(axis, rows.to(leaf.device)) for leaf, axis in self._pairs(state)]
        )

    def choose(self, mask: Bool[Tensor, " B"], yes: State, no: State) -> State:
        """Take `yes` where the mask is true and `no` elsewhere."""
        pairs = zip(self._pairs(no), leaves(yes), strict=True)
        chosen = [torch.where(along(mask, axis, leaf), other, leaf) for (leaf, axis), other in pairs]
        return rebuilt(no, chosen)

    def join(self, states: Sequence[State]) -> State:
        """Lay the rows of several states behind each other."""
        columns = zip(*(leaves(state) for state in states), strict=True)
        joined = [torch.cat(parts, dim=axis) for parts, axis in zip(columns, self.axes, strict=True)]
        return rebuilt(states[0], joined)

    def count(self, state: State) -> list[int]:
        """Count the rows of each tensor."""
        return [leaf.shape[axis] for leaf, axis in self._pairs(state)]

    def _pairs(self, state: State) -> list[tuple[Tensor, int]]:
        return list(zip(leaves(state), self.axes, strict=True))


def rebuilt(state: State, tensors: Sequence[Tensor]) -> State:
    """Put other tensors into the places of a state's own."""
    left = iter(tensors)
    return pytree.tree_map_only(Tensor, lambda _: next(left), state)


def along(mask: Bool[Tensor, " n"], axis: int, like: Tensor) -> Bool[Tensor, "..."]:
    """Lay a mask along one axis of a tensor."""
    return mask.to(like.device).reshape([-1 if each == axis else 1 for each in range(like.dim())])
