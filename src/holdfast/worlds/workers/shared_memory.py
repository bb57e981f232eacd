"""Shared memory of trainer and workers: laid out once, written by workers, read without a copy."""

import math
import mmap
import os
import sys
import tempfile
from dataclasses import dataclass
from typing import Any, cast

import torch
from tensordict import TensorDict

from holdfast.types import Shaped, Tensor
from holdfast.worlds.step import Step

SLOTS = 2
"""Steps per group, used in turn: the last one stays readable while the next is written."""
ALIGNMENT = 64
ACTION_BYTES = 8
"""Bytes of the largest dtype of an action."""

SharedSchema = dict[tuple[str, ...], tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and row shape of every tensor of a step, by its path: `("reward",)`, `("obs", "image")`."""


def schema_of(step: Step) -> SharedSchema:
    """Return the schema of a step."""
    values = {name: value for name, value in vars(step).items() if value is not None}
    leaves = TensorDict(values, batch_size=step.reward.shape).items(True, True)
    return {key if isinstance(key, tuple) else (key,): (leaf.dtype, tuple(leaf.shape[1:])) for key, leaf in leaves}


def open_memory() -> int:
    """Open anonymous memory, which the kernel frees whatever happens to the processes."""
    if sys.platform == "linux":
        return os.memfd_create("holdfast", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


@dataclass(frozen=True)
class Layout:
    """Layout of the steps and actions of all groups in memory, equal in trainer and workers."""

    schema: SharedSchema
    rows: int
    """Agents of a group."""
    groups: int
    numbers: int
    """Numbers of one action."""

    def map(self, memory: int) -> "SharedBuffers":
        """Map open memory with this layout."""
        size = self.actions_at(self.groups)
        os.ftruncate(memory, size)
        return SharedBuffers(self, mmap.mmap(memory, size))

    def step_at(self, group: int, slot: int) -> int:
        """Return the offset of a group's step."""
        sizes = (self.tensor_size(dtype, shape) for dtype, shape in self.schema.values())
        return (group * SLOTS + slot) * sum(sizes)

    def actions_at(self, group: int) -> int:
        """Return the offset of a group's actions; they follow the steps."""
        return self.step_at(self.groups, 0) + group * _align(ACTION_BYTES * self.numbers * self.rows)

    def tensor_size(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        """Return the aligned number of bytes of one tensor of a step."""
        return _align(dtype.itemsize * math.prod(shape) * self.rows)


class SharedBuffers:
    """Tensors in shared memory."""

    def __init__(self, layout: Layout, memory: mmap.mmap) -> None:
        self.layout, self._memory = layout, memory
        self._steps = {
            (group, slot): self._map_step(layout.step_at(group, slot))
            for group in range(layout.groups)
            for slot in range(SLOTS)
        }

    def step(self, group: int, slot: int) -> Step:
        """Return a view of a group's step."""
        return self._steps[group, slot]

    def actions(self, group: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Shaped[Tensor, "N ..."]:
        """Return a view of a group's actions."""
        return self._tensor(self.layout.actions_at(group), dtype, shape)

    def _map_step(self, offset: int) -> Step:
        step = TensorDict({}, batch_size=[self.layout.rows])
        for path, (dtype, shape) in self.layout.schema.items():
            step[path] = self._tensor(offset, dtype, shape)
            offset += self.layout.tensor_size(dtype, shape)
        return Step(**cast("dict[str, Any]", dict(step.items())))

    def _tensor(self, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        shape = (self.layout.rows, *shape)
        count = math.prod(shape)
        if not count:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).reshape(shape)


def write_step(step: Step, target: Step, rows: slice) -> None:
    """Copy a step into some rows of another."""
    for name, value in vars(step).items():
        target_value = vars(target)[name]
        # `last_obs` may be absent in either.
        if value is not None and target_value is not None:
            target_value[rows] = value


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
