"""Oracles: scripts that read a policy's observations and get the best return of their world.

One is none: the best of `arena` is not known; it lies between what `Gathers` gets and a bound.
"""

from collections import deque
from collections.abc import Callable

import torch

from holdfast import rng
from holdfast.types import Bool, Int, Tensor, UInt8
from holdfast.worlds.builtin.arena import AGENTS_PER_MAP, VIEW, Arena
from holdfast.worlds.builtin.mazes import Forage
from holdfast.worlds.builtin.symbols import KeyValue, NBack
from holdfast.worlds.step import World
from holdfast.worlds.tensor_world import MOVES
from holdfast.worlds.tokens import PADDING, pack_location

Obs = UInt8[Tensor, "A M 3"]
Act = Int[Tensor, " A"]
NORTH, SOUTH, EAST = 0, 1, 3
"""Moves of `holdfast.worlds.tensor_world.MOVES`."""


def sees(obs: Obs, feature: int, location: int | None = None) -> Bool[Tensor, " A"]:
    """Return which agents see a feature, at a location if one is passed."""
    there = (obs[..., 1] == feature) & (obs[..., 0] != PADDING)
    return (there if location is None else there & (obs[..., 0] == location)).any(1)


def which(obs: Obs, features: range) -> tuple[Act, Bool[Tensor, " A"]]:
    """Return which of some features each agent sees, counted from the first, and which agents see any of them."""
    each = torch.stack([sees(obs, feature) for feature in features], dim=1)
    return each.int().argmax(1), each.any(1)


class NamesTheCue:
    """Holds the cue it saw last: `recall` and `ragged`."""

    def __init__(self, world: World) -> None:
        self._cues = range(1, 1 + len(world.spec.action_names))
        self._cue: Tensor | int = 0

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Name the cue, always."""
        cue, visible = which(obs, self._cues)
        self._cue = torch.where(visible, cue, self._cue)
        return self._cue


class NamesTheFirst:
    """Holds the symbol that opened the episode: `repeat_first`."""

    def __init__(self, world: World) -> None:
        self._symbols = range(len(world.spec.action_names))
        self._symbol: Tensor | int = 0

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Name the first symbol."""
        self._symbol = torch.where(first, which(obs, self._symbols)[0], self._symbol)
        return self._symbol


class NamesTheOneBefore:
    """Holds the last few symbols: `n_back`."""

    def __init__(self, world: NBack) -> None:
        self._symbols = range(world.symbols)
        self._recent: deque[Tensor] = deque(maxlen=world.back + 1)

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Name the oldest symbol it holds."""
        self._recent.append(which(obs, self._symbols)[0])
        return self._recent[0]


class Counts:
    """Holds one bit, and flips it with every 1: `parity`."""

    def __init__(self, world: World) -> None:
        self._odd: Tensor | int = 0

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Say the parity so far."""
        self._odd = torch.where(first, 0, self._odd) ^ sees(obs, 1).long()
        return self._odd


class LooksUp:
    """Holds a value for each key: `key_value`."""

    def __init__(self, world: KeyValue) -> None:
        n = world.pairs
        self._keys, self._queries = range(n), range(n, 2 * n)
        self._values = range(2 * n, 2 * n + world.values)
        self._table: Tensor | int = 0

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Name the value of the key that is asked."""
        (key, shown), (value, _), (query, _) = (which(obs, each) for each in (self._keys, self._values, self._queries))
        mask = torch.nn.functional.one_hot(key, len(self._keys)).bool() & shown[:, None]
        self._table = torch.where(mask, value[:, None], self._table)
        return self._table.gather(1, query[:, None])[:, 0]


class GoesWhereTold:
    """Holds the cue on its way through the corridor: `tmaze`."""

    def __init__(self, world: World) -> None:
        self._cue: Tensor | int = 0

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Go east, and at the junction where the cue said."""
        cue, visible = which(obs, range(1, 3))
        self._cue = torch.where(visible, cue, self._cue)
        corridor = sees(obs, 0, pack_location(4, 5))
        return torch.where(corridor, EAST, torch.where(self._cue == 0, NORTH, SOUTH))


class Searches:
    """Tries arm after arm, and stays with the one that had the goal: `forage`."""

    def __init__(self, world: Forage) -> None:
        self._arms = range(2, 2 + world.arms)
        self._out = world.reach
        self._arm: Tensor | int = 0
        self._steps: Tensor | int = 0

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Go outwards; the moves are in the order of the arms."""
        arm = torch.where(first, 0, self._arm)
        steps = torch.where(first, 0, self._steps)
        at_end = steps == self._out
        missed = at_end & ~sees(obs, 1)
        self._arm = (arm + missed.long()) % len(self._arms)
        self._steps = torch.where(at_end, 0, steps + 1)
        return arm


FAR = 1000
"""More steps than any way through a window has."""


def steps_to(goal: Bool[Tensor, "A R C"], wall: Bool[Tensor, "A R C"]) -> Int[Tensor, "A R C"]:
    """Count the steps from every cell to the nearest goal, around walls; FAR where no way is seen."""
    shut = torch.where(wall, FAR, 0).short()
    near = torch.where(goal, 0, FAR).short().maximum(shut)
    while True:
        far, near = near, near.clone()
        for axis in (1, 2):
            size = near.shape[axis] - 1
            for one, other in ((0, 1), (1, 0)):
                here, beside = near.narrow(axis, one, size), near.narrow(axis, other, size)
                here.copy_(torch.minimum(here, beside + 1).maximum(shut.narrow(axis, one, size)))
        if torch.equal(near, far):
            return far


class Gathers:
    """Walks to the nearest ripe thing it sees, around walls: `arena`.

    What another agent in sight is nearer to is left to that one, unless there is nothing else. Who sees
    nothing ripe walks on to the edge of what it sees, in the direction it holds, and turns where no way
    leads there. It is a good player, and not the best there is: it does not remember what grows where.
    """

    def __init__(self, world: Arena) -> None:
        self._seed, self._agent, self._clock = world.seed, torch.arange(world.agents), 0
        self._heading = self._chance(4, 0)
        middle, last = VIEW, 2 * VIEW
        cells = torch.arange(last + 1)
        row, column = cells[:, None].expand(-1, last + 1), cells.expand(last + 1, -1)
        self._here = (row == middle) & (column == middle)
        self._edges = torch.stack([row == 0, row == last, column == 0, column == last])

    def _chance(self, limit: int, which: int) -> Act:
        return rng.randint(limit, self._seed, rng.STREAM_ACTION, self._agent, 2 * self._clock + which)

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Take a step on the shortest way to what it wants; the first action is to stay."""
        self._clock += 1
        wall, ripe, agents = (self._cells(obs, feature) for feature in range(3))
        own_steps, other_steps = steps_to(self._here & ~wall, wall), steps_to(agents & ~self._here, wall)
        ripe &= own_steps < FAR
        free = ripe & (own_steps < other_steps)
        wanted = torch.where(free.any((1, 2), keepdim=True), free, ripe)
        nearest = torch.where(wanted, own_steps, FAR).amin((1, 2), keepdim=True)
        goal = torch.where(nearest < FAR, wanted & (own_steps == nearest), self._ahead(own_steps))
        way = steps_to(goal, wall)
        beside = [way[:, VIEW + r, VIEW + c] for r, c in MOVES.values()]
        best = torch.stack(beside, dim=1)
        return torch.where(best.amin(1) < FAR, 1 + best.argmin(1), 0)

    def _ahead(self, own_steps: Int[Tensor, "A R C"]) -> Bool[Tensor, "A R C"]:
        """Choose where to wander; who cannot go on turns."""
        ahead = self._edges[self._heading] & (own_steps < FAR)
        stuck = ~ahead.any(2).any(1) | (self._chance(50, 1) == 0)
        self._heading = torch.where(stuck, self._chance(4, 0), self._heading)
        return self._edges[self._heading] & (own_steps < FAR)

    def _cells(self, obs: Obs, feature: int) -> Bool[Tensor, "A R C"]:
        """Lay the tokens of a feature out as the window."""
        place, size = obs[..., 0].long(), 2 * VIEW + 1
        there = (obs[..., 1] == feature) & (place != PADDING)
        # Everything else is laid into a cell that is cut off.
        index = torch.where(there, (place >> 4) * size + (place & 15), size * size)
        flat = torch.zeros(len(obs), size * size + 1, dtype=torch.bool).scatter_(1, index, True)
        return flat[:, :-1].unflatten(1, (size, size))


class DoesAnything:
    """Needs to do nothing: `constant`."""

    def __init__(self, world: World) -> None:
        pass

    def __call__(self, obs: Obs, first: Bool[Tensor, " A"]) -> Act:
        """Take the first action."""
        return torch.zeros_like(first, dtype=torch.long)


ORACLES: dict[str, Callable[..., Callable[[Tensor, Tensor], Tensor]]] = {
    "recall": NamesTheCue,
    "repeat_first": NamesTheFirst,
    "n_back": NamesTheOneBefore,
    "tmaze": GoesWhereTold,
    "key_value": LooksUp,
    "parity": Counts,
    "forage": Searches,
    "ragged": NamesTheCue,
    "constant": DoesAnything,
}
"""Each is built for a world and called as `oracle(obs, first) -> actions`; the best of `arena` is not
known, and `Gathers` is not among them."""


def arena_return_at_most(world: Arena, episodes: int) -> float:
    """Return an upper bound of the mean return of every agent's first `episodes` episodes.

    A resource is taken at most once in any `regrow` steps, and an agent takes at most one per step. So on a map
    with n resources, 24 agents take at most min(n, 24 r) in r <= regrow consecutive steps. An episode consists of
    full periods of `regrow` steps and a shorter one; the mean return is at most the sum of their bounds over 24.
    Walking is not counted, so the best return is lower. First episodes have `first_lengths` steps.
    """
    grows = (world._fresh > 0).sum(1)

    def taken_at_most(steps: Tensor) -> Tensor:
        periods, rest = steps // world.regrow, steps % world.regrow
        full = periods * grows.clamp(max=AGENTS_PER_MAP * world.regrow)
        return full + torch.minimum(grows, AGENTS_PER_MAP * rest)

    first, later = world.first_lengths(), torch.full_like(grows, world.length)
    taken = taken_at_most(first) + (episodes - 1) * taken_at_most(later)
    return float(taken.double().mean()) / AGENTS_PER_MAP / episodes
