"""Where the memories of a policy are read: hooks that hear, change or follow every call of a cell."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from tensordict import TensorDict

from holdfast.memory import Bundle, Cell
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Tensor
from holdfast.worlds.seen import leaves_of

WORDS = ("x", "state", "clear", "valid")
"""What a cell is called with, in this order or by name."""
Heard = Mapping[str, Any]


def readers_of(policy: LSTMWrapper) -> dict[Cell, tuple[Cell, ...]]:
    """List the cells that may be called, each with those it stands for: a bundle for all of its parts.

    A graph calls the parts of its bundle one by one, another policy may call the bundle as a whole; it then
    goes to its parts by a way that hooks do not see, so nothing is heard twice.
    """
    return dict(_readers(policy.lstm.cell))


def remembers(cell: Cell) -> bool:
    """Say whether a cell keeps anything from step to step."""
    return not cell.initial(0).is_empty()


@contextmanager
def hearing(policy: LSTMWrapper, hear: Callable[[Cell, Heard], None]) -> Iterator[None]:
    """Tell `hear` of every call of a cell before it reads."""
    with _hooked(policy, "register_forward_pre_hook", partial(_hear, hear)):
        yield


@contextmanager
def changing(policy: LSTMWrapper, change: Callable[[Cell, Tensor], Tensor]) -> Iterator[None]:
    """Let every cell read `change(cell, x)` in the place of x."""
    with _hooked(policy, "register_forward_pre_hook", partial(_change, change)):
        yield


@contextmanager
def following(policy: LSTMWrapper, follow: Callable[[Cell, TensorDict], None]) -> Iterator[None]:
    """Tell `follow` the state that every call of a cell leaves."""
    with _hooked(policy, "register_forward_hook", partial(_follow, follow)):
        yield


@contextmanager
def same_randomness(policy: LSTMWrapper) -> Iterator[None]:
    """Leave the generators that all share as they were: a policy that drops out draws from them."""
    device = next(policy.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def live_state(policy: LSTMWrapper) -> TensorDict:
    """Put the live memories of all slices together, in the order of the agents."""
    store = policy.store
    return cast("TensorDict", torch.cat([store.live(start) for start in sorted(store.slices)]))


def lengths(state: TensorDict) -> Float[Tensor, " B"]:
    """Say how long each agent's state is, all of its numbers taken as one vector."""
    squares = [leaf.float().flatten(1).square().sum(1) for leaf in leaves_of(state)]
    return torch.stack(squares).sum(0).sqrt()


def _readers(cell: Cell) -> Iterator[tuple[Cell, tuple[Cell, ...]]]:
    if not isinstance(cell, Bundle):
        yield cell, (cell,)
        return
    inside = [pair for part in cell.cells.values() for pair in _readers(part)]
    yield cell, tuple(each for each, _ in inside if not isinstance(each, Bundle))
    yield from inside


@contextmanager
def _hooked(policy: LSTMWrapper, how: str, hook: Callable[..., Any]) -> Iterator[None]:
    """Hang a hook on every cell, and take it off: a copy of the policy, made elsewhere, has none."""
    with ExitStack() as stack:
        for cell in readers_of(policy):
            stack.callback(getattr(cell, how)(hook, with_kwargs=True).remove)
        yield


def _hear(hear: Callable[[Cell, Heard], None], cell: Cell, given: tuple[Any, ...], named: Heard) -> None:
    hear(cell, dict(zip(WORDS, given, strict=False)) | dict(named))


def _change(
    change: Callable[[Cell, Tensor], Tensor], cell: Cell, given: tuple[Any, ...], named: Heard
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if given:
        return (change(cell, given[0]), *given[1:]), dict(named)
    return (), {**named, "x": change(cell, named["x"])}


def _follow(
    follow: Callable[[Cell, TensorDict], None], cell: Cell, given: tuple[Any, ...], named: Heard, result: Any
) -> None:
    follow(cell, result[1])
