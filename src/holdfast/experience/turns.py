"""A rollout in a world in which some agents are answered while others act."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from tensordict import TensorDict

from holdfast.shapes import Int, Tensor
from holdfast.worlds import Step
from holdfast.worlds.turns import Turn, joined, picked


def live_in_turns(
    shares: Sequence[Int[Tensor, " _"]],
    pending: Step,
    length: int,
    answer: Callable[[Turn, Int[Tensor, " N"]], None],
    hear: Callable[[], Turn],
) -> Step:
    """Let every agent live so many steps from `pending` on; return what all of them are to answer next.

    `answer` lets the agents of a turn act, who have lived as many steps as its second argument says; `hear`
    waits for the next turn.
    """
    lived, left = torch.zeros(len(pending.reward), dtype=torch.long), len(pending.reward)
    coming = deque(Turn(rows, picked(pending, rows)) for rows in shares)
    over: list[Turn] = []
    while left:
        for part, when in _parts(coming.popleft() if coming else hear(), lived, length):
            if when is None:
                over.append(part)
                left -= len(part.rows)
            else:
                answer(part, when)
                lived[part.rows] += 1
    return joined(over)


def _parts(
    turn: Turn, lived: Int[Tensor, " A"], length: int
) -> Iterator[tuple[Turn, Int[Tensor, " N"] | None]]:
    """Give those of a turn that live on, and how long they have; then those that have lived long enough."""
    when = lived[turn.rows]
    on = when < length
    if bool(on.all()):
        yield turn, when
        return
    if bool(on.any()):
        places = on.nonzero().flatten()
        yield Turn(turn.rows[places], picked(turn.step, places)), when[places]
    rest = (~on).nonzero().flatten()
    yield Turn(turn.rows[rest], picked(turn.step, rest)), None


def moment_of(when: Int[Tensor, " N"]) -> int | Int[Tensor, " N"]:
    """Say at which step agents are: one number, if it is one for all."""
    first = int(when[0])
    return first if bool((when == first).all()) else when


class Edges:
    """States at the edges of segments: noted for those who come by one, when they do."""

    def __init__(self, state: TensorDict, length: int, horizon: int, at: int) -> None:
        count = length // horizon
        self.states = cast("TensorDict", state[:, None].expand(len(state), count).clone())
        self._horizon, self._at = horizon, at

    def pass_by(self, rows: slice | Tensor, when: Int[Tensor, " N"], state: TensorDict) -> None:
        """Note the states of those who are at an edge before they read on."""
        here = when % self._horizon == self._at
        if not bool(here.any()):
            return
        moment = moment_of(when)
        if isinstance(moment, int):
            self.states[rows, moment // self._horizon] = state
            return
        places = here.nonzero().flatten().to(rows.device if isinstance(rows, Tensor) else "cpu")
        who = torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        edge = (when // self._horizon).to(places.device)
        self.states[who[places], edge[places]] = state[places]
