"""A function of tensors that is replayed as a CUDA graph."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from holdfast import cuda_graphs
from holdfast.cuda_graphs import CannotRecordError, Replay
from holdfast.object_state import tree_leaves
from holdfast.types import Tensor

T = TypeVar("T")
MAX_RECORDINGS = 8
"""A call whose tensors are in more places than this is recorded for the first of them only."""


class RecordedCall(Generic[T]):
    """Replays a function that reads and changes tensors, and returns a tree of them: always the same ones.

    `inputs` are what it reads; as long as they stay where they are it is replayed, from the second call on. Without
    `is_on`, and where it cannot be recorded, the function is called.
    """

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._recordings: dict[Any, tuple[Replay, T]] = {}
        self._last: Any = None

    def __call__(self, function: Callable[..., T], *inputs: Any, key: Hashable = None) -> T:
        """Call or replay a function, always the same one; `key` is all that it depends on beside tensors.

        It is not kept: a method would keep its object, and all it holds, in memory until cycles are collected.
        """
        leaves = tree_leaves(inputs) if self._is_on else []
        if not leaves:
            return function(*inputs)
        where = key, tuple(_where(leaf) for leaf in leaves)
        if where not in self._recordings:
            if where != self._last or len(self._recordings) == MAX_RECORDINGS:
                # The first call initializes all that is made when it is first used.
                self._last = where
                return function(*inputs)
            try:
                self._recordings[where] = _record(function, inputs, leaves[0])
            except CannotRecordError:
                self._is_on = False
                return function(*inputs)
        replay, result = self._recordings[where]
        replay()
        return result


def _record(function: Callable[..., T], inputs: tuple[Any, ...], like: Tensor) -> tuple[Replay, T]:
    results = list[T]()
    replay = cuda_graphs.record(lambda: results.append(function(*inputs)), like.device)
    return replay, results[0]


def _where(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype
