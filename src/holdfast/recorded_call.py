"""A function of tensors that is replayed as a CUDA graph."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from holdfast import cuda_graphs
from holdfast.cuda_graphs import CannotRecordError, Replay
from holdfast.object_state import tree_leaves
from holdfast.types import Tensor

T = TypeVar("T")
MAX_RECORDINGS = 4
"""A call whose tensors move more often than this is not recorded any more."""


class RecordedCall(Generic[T]):
    """Replays a function that reads and changes tensors, and returns a tree of them: always the same ones.

    `inputs` are what it reads; as long as they stay where they are it is replayed, from the second call on. Without
    `is_on`, and where it cannot be recorded, the function is called.
    """

    def __init__(self, function: Callable[..., T], *, is_on: bool) -> None:
        self._function, self._is_on = function, is_on
        self._where: Any = None
        self._replay: Replay | None = None
        self._recordings = 0
        self._result: T

    def __call__(self, *inputs: Any, key: Hashable = None) -> T:
        """Call or replay the function; `key` is all that it depends on beside tensors."""
        leaves = tree_leaves(inputs) if self._is_on else []
        if not leaves:
            return self._function(*inputs)
        where = key, [_where(leaf) for leaf in leaves]
        if where != self._where:
            # The first call initializes all that is made when it is first used.
            self._where, self._replay = where, None
            return self._function(*inputs)
        if self._replay is None:
            try:
                self._record(inputs, leaves[0])
            except CannotRecordError:
                self._is_on = False
                return self._function(*inputs)
        assert self._replay is not None, "recorded above"
        self._replay()
        return self._result

    def _record(self, inputs: tuple[Any, ...], like: Tensor) -> None:
        if self._recordings == MAX_RECORDINGS:
            raise CannotRecordError("its tensors move")
        self._recordings += 1

        def call() -> None:
            self._result = self._function(*inputs)

        self._replay = cuda_graphs.record(call, like.device)


def _where(leaf: Tensor) -> tuple[Any, ...]:
    return leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype
