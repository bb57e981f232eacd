"""A contest: two policies in worlds where several share a place, each with memories of its own."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from holdfast.errors import ContractError
from holdfast.experience.evaluate import PATIENCE, Evaluation, own_randomness, play
from holdfast.experience.minds import MemoryMode, Mind
from holdfast.experience.tally import Tally
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Int, Tensor
from holdfast.worlds import Step, World
from holdfast.worlds.watched import watched


@dataclass(frozen=True)
class Contest:
    """What two policies returned where both lived: first on one side each, then with sides swapped."""

    mine: tuple[Evaluation, Evaluation]
    theirs: tuple[Evaluation, Evaluation]

    @property
    def leads(self) -> tuple[Float[Tensor, "_ 1"], ...]:
        """By how much mine did better than theirs, on the mean of each place and round."""
        pairs = zip(self.mine, self.theirs, strict=True)
        return tuple(_per_place(one) - _per_place(other) for one, other in pairs)


@torch.no_grad()
def compete(
    policy: LSTMWrapper,
    other: LSTMWrapper,
    world: World,
    *,
    episodes: int,
    memory: MemoryMode = "intact",
    greedy: bool = True,
    seed: int = 0,
    patience: int = PATIENCE,
) -> Contest:
    """Play against another policy: in every crowd, every second agent is the other's.

    The world is lived twice, with sides swapped, in whole rounds: at least `episodes` in all, and each row
    is played by both equally often. `memory` is what is done to that of `policy`; the other's is intact.
    """
    if world.spec.crowd < 2:
        raise ContractError(
            f"In {world.spec.name or type(world).__name__} everybody is alone, so nobody plays against "
            "others; a contest needs a world where several share a place (spec.crowd), such as arena."
        )
    world = watched(world)
    share, sides = math.ceil(episodes / 2 / world.agents), list[tuple[Evaluation, Evaluation]]()
    for swapped in (False, True):
        with own_randomness(seed):
            step = world.reset()
            rows = torch.arange(world.agents, device=step.reward.device)
            second = (rows % world.spec.crowd) % 2 == 1
            mine, theirs = (rows[second == swapped], rows[second != swapped])
            told = {"greedy": greedy, "seed": seed}
            one = Mind(policy, world.spec, mine, memory=memory, **told)
            two = Mind(other, world.spec, theirs, **told)
            both = _Both((one, mine), (two, theirs))
            tally = play(world, step, both.act, Tally(world.agents, share, rows.device, patience))
        places = world.agents // world.spec.crowd
        sides.append((_side(tally, mine, places, memory), _side(tally, theirs, places, "intact")))
    (one, two), (three, four) = sides
    return Contest((one, three), (two, four))


def _per_place(side: Evaluation) -> Float[Tensor, "places 1"]:
    return side.places.double().mean(1, keepdim=True)


class _Both:
    """Two minds, each with rows of its own, that answer as one."""

    def __init__(self, *minds: tuple[Mind, Int[Tensor, " _"]]) -> None:
        self._minds = minds
        self._back = torch.cat([rows for _, rows in minds]).argsort()

    def act(self, step: Step) -> Tensor:
        """Ask each mind for its rows."""
        return torch.cat([mind.act(_rows_of(step, rows)) for mind, rows in self._minds])[self._back]


def _rows_of(step: Step, rows: Int[Tensor, " _"]) -> Step:
    """Take what was said to some rows."""
    told: dict[str, Any] = {each.name: getattr(step, each.name) for each in fields(step)}
    return replace(step, **{name: leaf[rows] for name, leaf in told.items() if leaf is not None})


def _side(tally: Tally, rows: Int[Tensor, " _"], places: int, memory: MemoryMode) -> Evaluation:
    """Take what one side's rows lived, round by round."""
    returns, lengths = (table[rows].T.flatten() for table in (tally.returns, tally.lengths))
    return Evaluation(returns, lengths, memory, len(rows) // places)
