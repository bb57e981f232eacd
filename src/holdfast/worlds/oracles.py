"""Oracles: scripts that see what a policy sees, remember what they must, and play their world at its best."""

from collections import deque
from collections.abc import Callable

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.forage import Forage
from holdfast.worlds.key_value import KeyValue
from holdfast.worlds.n_back import NBack
from holdfast.worlds.step import World
from holdfast.worlds.tokens import PADDING, pack_location

Seen = UInt8[Tensor, "A M 3"]
Act = Int[Tensor, " A"]
NORTH, SOUTH, EAST = 0, 1, 3
"""Moves of `holdfast.worlds.maze.MOVES`."""


def sees(obs: Seen, feature: int, location: int | None = None) -> Bool[Tensor, " A"]:
    """Say who sees a feature, at a place if one is given."""
    there = (obs[..., 1] == feature) & (obs[..., 0] != PADDING)
    return (there if location is None else there & (obs[..., 0] == location)).any(1)


def which(obs: Seen, features: range) -> tuple[Act, Bool[Tensor, " A"]]:
    """Say which of some features each one sees, counted from the first, and who sees any of them."""
    each = torch.stack([sees(obs, feature) for feature in features], dim=1)
    return each.int().argmax(1), each.any(1)


class NamesTheCue:
    """Holds the cue it saw last: `recall` and `ragged`."""

    def __init__(self, world: World) -> None:
        self._cues = range(1, 1 + len(world.spec.action_names))
        self._held: Tensor | int = 0

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
        """Name the cue, always."""
        cue, seen = which(obs, self._cues)
        self._held = torch.where(seen, cue, self._held)
        return self._held


class NamesTheFirst:
    """Holds the symbol that opened the episode: `repeat_first`."""

    def __init__(self, world: World) -> None:
        self._symbols = range(len(world.spec.action_names))
        self._held: Tensor | int = 0

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
        """Name the first symbol."""
        self._held = torch.where(first, which(obs, self._symbols)[0], self._held)
        return self._held


class NamesTheOneBefore:
    """Holds the last few symbols: `n_back`."""

    def __init__(self, world: NBack) -> None:
        self._symbols = range(world.symbols)
        self._seen: deque[Tensor] = deque(maxlen=world.back + 1)

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
        """Name the oldest symbol it holds."""
        self._seen.append(which(obs, self._symbols)[0])
        return self._seen[0]


class Counts:
    """Holds one bit, and flips it with every 1: `parity`."""

    def __init__(self, world: World) -> None:
        self._odd: Tensor | int = 0

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
        """Say the parity so far."""
        self._odd = torch.where(first, 0, self._odd) ^ sees(obs, 1).long()
        return self._odd


class LooksUp:
    """Holds a value for each key: `key_value`."""

    def __init__(self, world: KeyValue) -> None:
        n = world.pairs
        self._keys, self._asked = range(n), range(n, 2 * n)
        self._values = range(2 * n, 2 * n + world.values)
        self._held: Tensor | int = 0

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
        """Name the value of the key that is asked."""
        (key, shown), (value, _), (asked, _) = (
            which(obs, each) for each in (self._keys, self._values, self._asked)
        )
        mine = torch.nn.functional.one_hot(key, len(self._keys)).bool() & shown[:, None]
        self._held = torch.where(mine, value[:, None], self._held)
        return self._held.gather(1, asked[:, None])[:, 0]


class GoesWhereTold:
    """Holds the cue on its way through the corridor: `tmaze`."""

    def __init__(self, world: World) -> None:
        self._held: Tensor | int = 0

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
        """Go east, and at the junction where the cue said."""
        cue, seen = which(obs, range(1, 3))
        self._held = torch.where(seen, cue, self._held)
        corridor = sees(obs, 0, pack_location(4, 5))
        return torch.where(corridor, EAST, torch.where(self._held == 0, NORTH, SOUTH))


class Searches:
    """Tries arm after arm, and stays with the one that had the goal: `forage`."""

    def __init__(self, world: Forage) -> None:
        self._arms = range(2, 2 + world.arms)
        self._out = world.reach
        self._arm: Tensor | int = 0
        self._steps: Tensor | int = 0

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
        """Go outwards; the moves are in the order of the arms."""
        arm = torch.where(first, 0, self._arm)
        steps = torch.where(first, 0, self._steps)
        at_end = steps == self._out
        missed = at_end & ~sees(obs, 1)
        self._arm = (arm + missed.long()) % len(self._arms)
        self._steps = torch.where(at_end, 0, steps + 1)
        return arm


class DoesAnything:
    """Needs to do nothing: `constant`."""

    def __init__(self, world: World) -> None:
        pass

    def __call__(self, obs: Seen, first: Bool[Tensor, " A"]) -> Act:
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
"""Each is built for a world and called as `oracle(obs, first) -> actions`; `arena` has no known best."""
