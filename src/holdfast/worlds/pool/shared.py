"""Memory that processes share: laid out once, written by workers, read without copying."""

import math
import mmap
import os
import sys
import tempfile
from dataclasses import dataclass, fields
from typing import Any, Union, cast

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.shapes import Shaped, Tensor
from holdfast.worlds.seen import Seen
from holdfast.worlds.step import Step

SLOTS = 2
"""Places for the steps of a share, in turn: what was told last stays while the next is being written."""
ALIGNED = 64
ACTION_BYTES = 8
"""Bytes of the largest number that an action is made of."""


@dataclass(frozen=True)
class Leaf:
    """One tensor of a step: what its numbers are, and the shape of one row."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """How many bytes a row takes."""
        return self.dtype.itemsize * math.prod(self.shape)


Form = dict[str, Union[Leaf, "Form"]]
"""What a step is made of, by name; nested as what is seen is."""


def form_of(step: Step) -> Form:
    """Say what a step is made of."""
    parts = {each.name: getattr(step, each.name) for each in fields(step)}
    return {name: _form_of(part) for name, part in parts.items() if part is not None}


def _form_of(seen: Seen) -> Leaf | Form:
    if not isinstance(seen, TensorDictBase):
        return Leaf(seen.dtype, tuple(seen.shape[1:]))
    return {str(key): _form_of(cast("Seen", part)) for key, part in seen.items()}


def open_memory() -> int:
    """Open memory without a name: whatever becomes of whom, nothing of it is left behind."""
    if sys.platform == "linux":
        return os.memfd_create("holdfast", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True)
class Layout:
    """How the steps and actions of all shares lie in memory; the same for who writes and who reads."""

    form: Form
    rows: int
    """Agents of a share."""
    shares: int
    numbers: int
    """Numbers of one action."""

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.shares * (SLOTS * self._step_size() + self._actions_size())

    def map(self, memory: int) -> "Board":
        """Lay it over memory that is open."""
        os.ftruncate(memory, self.size)
        return Board(self, mmap.mmap(memory, self.size))

    def step_at(self, share: int, slot: int) -> int:
        """Say where the step of a share begins."""
        return (share * SLOTS + slot) * self._step_size()

    def actions_at(self, share: int) -> int:
        """Say where the actions of a share begin."""
        return self.shares * SLOTS * self._step_size() + share * self._actions_size()

    def _step_size(self) -> int:
        return sum(aligned(leaf.row_bytes * self.rows) for leaf in _leaves(self.form))

    def _actions_size(self) -> int:
        return aligned(ACTION_BYTES * self.numbers * self.rows)


class Board:
    """Shared memory as tensors."""

    def __init__(self, layout: Layout, memory: mmap.mmap) -> None:
        self.layout, self._memory = layout, memory
        self._steps = {
            (share, slot): self._step(layout.step_at(share, slot))
            for share in range(layout.shares)
            for slot in range(SLOTS)
        }

    def step(self, share: int, slot: int) -> Step:
        """Look at a step where it lies."""
        return self._steps[share, slot]

    def actions(self, share: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Shaped[Tensor, "N ..."]:
        """Look at the actions of a share where they lie."""
        return self._tensor(self.layout.actions_at(share), dtype, (self.layout.rows, *shape))

    def _step(self, begin: int) -> Step:
        parts, _ = self._tree(self.layout.form, begin)
        return Step(**cast("dict[str, Any]", parts))

    def _tree(self, form: Form, begin: int) -> tuple[dict[str, Seen], int]:
        found = dict[str, Seen]()
        for name, part in form.items():
            if isinstance(part, Leaf):
                found[name] = self._tensor(begin, part.dtype, (self.layout.rows, *part.shape))
                begin += aligned(part.row_bytes * self.layout.rows)
            else:
                inside, begin = self._tree(part, begin)
                found[name] = TensorDict(dict(inside), batch_size=[self.layout.rows])
        return found, begin

    def _tensor(self, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = math.prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin).reshape(shape)


def write_step(step: Step, into: Step, rows: slice) -> None:
    """Copy a step into some rows of another."""
    for each in fields(step):
        part, place = getattr(step, each.name), getattr(into, each.name)
        # A world may show what was last seen where nobody reads it.
        if part is not None and place is not None:
            write_seen(part, place, rows)


def write_seen(seen: Seen, into: Seen, rows: slice) -> None:
    """Copy what is seen into some rows."""
    if isinstance(seen, Tensor):
        cast("Tensor", into)[rows] = seen
        return
    for key, part in seen.items():
        write_seen(cast("Seen", part), cast("TensorDictBase", into).get(key), rows)


def aligned(size: int) -> int:
    """Round up to where the next tensor may begin."""
    return -(-size // ALIGNED) * ALIGNED


def _leaves(form: Form) -> list[Leaf]:
    found = list[Leaf]()
    for part in form.values():
        found.extend([part] if isinstance(part, Leaf) else _leaves(part))
    return found
