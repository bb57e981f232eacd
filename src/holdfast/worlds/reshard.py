"""Divide the saved state of a world again, by agent, for another number of workers, groups or ranks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast.state_tree import get_field, mismatch
from holdfast.types import Tensor

State = Mapping[str, Any]


def reshard(state: State, workers: int, groups: int, current: Callable[[], Any]) -> list[Any]:
    """Return the saved state of a world as the states of `workers * groups` shards, in the order of their agents.

    0 workers are one whole world. `current` returns the present state of one shard. It shows which parts of a state are
    per agent: tensors, arrays and lists whose size differs as the numbers of agents do. All else must be equal in all
    shards. A shard of a restarted worker may have no state, and its seed is its own: it stays in its worker.
    """
    shards, counts, keys = [state], list[int](), "trainer.num_workers=0"
    if "shards" in state:
        by_worker, counts = get_field(state, "shards", list), get_field(state, "restart_counts", list)
        sizes = (get_field(state, "workers", int), get_field(state, "groups", int))
        if [len(shards) for shards in by_worker] != [sizes[1]] * sizes[0] or len(counts) != sizes[0]:
            raise mismatch("'shards' and 'restart_counts' must be those of every worker, a shard per group")
        shards = [shards[group] for group in range(sizes[1]) for shards in by_worker]
        keys = f"trainer.num_workers={sizes[0]} trainer.async_factor={sizes[1]}"
        if sizes == (workers, groups):
            return shards
    if None in shards or any(counts):
        raise ConfigError(
            f"A worker of this run was restarted with another seed, so its agents cannot change workers; type {keys}."
        )
    count = max(1, workers) * groups
    if len(shards) == count:
        return shards
    try:
        return _divide(shards, current(), count, "state()")
    except ValueError as error:
        raise ConfigError(f"The saved world cannot be divided into {count} shards: {error}; type {keys}.") from error


def join_ranks(states: Sequence[State | None], num_workers: int) -> dict[str, Any] | None:
    """Join the states of the ranks' worlds as that of one world in worker processes; None: one of them has none.

    Without `num_workers`, each rank's world is one shard.
    """
    parts = [state for state in states if state is not None]
    if len(parts) != len(states):
        return None
    if not num_workers:
        steps = get_field(parts[0], "steps", int)
        shards, counts, clocks = [list(parts)], [0], [steps] * len(parts)
    else:
        by_rank = [get_field(state, "shards", list) for state in parts]
        shards = [list(chain.from_iterable(rank[number] for rank in by_rank)) for number in range(num_workers)]
        counts = [
            max(pair) for pair in zip(*(get_field(state, "restart_counts", list) for state in parts), strict=True)
        ]
        clocks = list(chain.from_iterable(get_field(state, "clocks", list) for state in parts))
    return {
        "workers": len(shards),
        "groups": len(shards[0]),
        "clocks": clocks,
        "restart_counts": counts,
        "shards": shards,
    }


def part_of_rank(
    state: State, rank: int, ranks: int, *, workers: int, groups: int, current: Callable[[], Any]
) -> dict[str, Any]:
    """Return the state of one rank's world, of the state that `join_ranks` or a single process saved."""
    shards = reshard(state, workers, groups * ranks, current)
    own = shards[rank * groups * max(1, workers) :][: groups * max(1, workers)]
    if not workers:
        return own[0]
    clock = max(get_field(state, "clocks", list)) if "shards" in state else get_field(state, "steps", int)
    return {
        "workers": workers,
        "groups": groups,
        "clocks": [clock] * groups,
        "restart_counts": [0] * workers,
        "shards": [own[number::workers] for number in range(workers)],
    }


def _divide(parts: Sequence[Any], like: Any, count: int, path: str) -> list[Any]:
    """Join one part of every shard's state, and divide it into `count` parts like `like`."""
    first = parts[0]
    if isinstance(first, Mapping) and isinstance(like, Mapping):
        if any(part.keys() != like.keys() for part in parts):
            raise ValueError(f"{path} has other keys in every shard")
        columns = {k: _divide([part[k] for part in parts], like[k], count, f"{path}[{k!r}]") for k in like}
        return [{key: column[number] for key, column in columns.items()} for number in range(count)]
    if _shape(first) != _shape(like):
        return _divide_rows(parts, like, count, path)
    if not all(_equal(part, first) for part in parts):
        raise ValueError(f"{path} differs between shards and is not per agent")
    return [first] * count


def _divide_rows(parts: Sequence[Any], like: Any, count: int, path: str) -> list[Any]:
    """Join tensors, arrays or lists along the axis of the agents, the only one that differs, and divide them."""
    shape, size = _shape(parts[0]), _shape(like)
    axes = [axis for axis, (one, other) in enumerate(zip(shape, size, strict=False)) if one != other]
    if len(shape) != len(size) or len(axes) != 1 or shape[axes[0]] * len(parts) != size[axes[0]] * count:
        raise ValueError(f"{path} has the shape {list(shape)}, which is not per agent")
    if isinstance(like, list):
        rows = list(chain.from_iterable(parts))
        return [rows[number * len(like) : (number + 1) * len(like)] for number in range(count)]
    if isinstance(like, np.ndarray):
        return np.split(np.concatenate(parts, axes[0]), count, axes[0])
    return list(torch.cat(list(parts), axes[0]).split(size[axes[0]], axes[0]))


def _shape(part: Any) -> tuple[int, ...]:
    """Shape of a tensor or array, length of a list; numbers and texts have none."""
    if isinstance(part, list):
        return (len(part),)
    return tuple(part.shape) if isinstance(part, Tensor | np.ndarray) else ()


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor | np.ndarray):
        return type(left) is type(right) and np.array_equal(np.asarray(left), np.asarray(right))
    return bool(left == right)
