"""`arena`: crowds of 24 collect what regrows, each seeing 11 x 11 cells: the world of throughput."""

import torch

from holdfast.errors import ConfigError, CrowdError
from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds import draws, tokens
from holdfast.worlds.embedded import Embedded, Told, require
from holdfast.worlds.maze import MOVES
from holdfast.worlds.step import Feature, WorldSpec

CROWD = 24
"""Agents that live on one map."""
VIEW = 5
"""Cells seen to each side; maps have a rim of walls as wide, so that nobody looks over an edge."""
WALL, RESOURCE, AGENT = (tokens.word(feature, 1) for feature in range(3))
LONG = 2**30
"""More steps than an episode has."""


class Arena(Embedded):
    """On each map of `size` x `size` cells 24 agents walk; who steps on something ripe gets 1 for it.

    `walls` percent of the cells are walls, and on `resources` percent of the others something grows; taken,
    it is ripe again after `regrow` steps. Agents may share a cell; of those who do, the one with the lowest
    number takes what is ripe there. They see what lies up to 5 cells away, up to `sight` tokens, row by row.
    All agents of a map begin and end together after `length` steps, on other cells each time, in a random
    order of the free ones; maps are put out of step by shorter first episodes. `agents` is a multiple of 24.
    With `truncate`, episodes end by truncation, at the price of showing everything twice.

    It measures speed, and no memory: what the best return is depends on 24 agents and the map, is not
    known, and not in its spec. It lies between what a script gets, `holdfast.worlds.oracles.Gathers`, and
    what grows, `return_at_most`. An agent's row depends on its map only, never on how many maps there are.

    Time is told by the steps that are left: a cell is ripe if no more are left than stands in it.
    """

    def __init__(
        self,
        agents: int,
        *,
        size: int = 32,
        walls: int = 20,
        resources: int = 20,
        regrow: int = 50,
        length: int = 500,
        sight: int = 200,
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        if agents % CROWD:
            near = max(1, round(agents / CROWD)) * CROWD
            raise CrowdError(f"world.agents={agents} is not a multiple of {CROWD}; try {near}.", CROWD)
        for key, given, low, high in (
            ("size", size, 12, 1000),
            ("walls", walls, 0, 50),
            ("resources", resources, 0, 100),
        ):
            require(key, given, low, high)
        self.length, self.regrow = require("length", length, 1, LONG), require("regrow", regrow, 1, LONG)
        spec = WorldSpec(
            obs_shape=(require("sight", sight, 1, 1000), 3),
            action_names=("noop", *MOVES),
            features=(Feature("wall", 1.0), Feature("resource", 1.0), Feature("agent", 1.0)),
            truncates="always" if truncate else "never",
            crowd=CROWD,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        self._map, self._sizes = torch.arange(agents // CROWD, device=device), (size, walls, resources)
        # By which number a map is drawn: in a share of a bigger world another one than its place.
        self._number = self._map
        self._lay_out(*self._sizes)
        self._look_out(size + 2 * VIEW)

    def count_from(self, first_agent: int) -> None:
        """Draw the maps that these agents have in a bigger world; said before `reset()`."""
        super().count_from(first_agent)
        if first_agent % CROWD:
            raise ConfigError(f"A share of arena begins with a crowd of {CROWD}, not at agent {first_agent}.")
        self._number = self._map + first_agent // CROWD
        self._lay_out(*self._sizes)

    def _lay_out(self, size: int, walls: int, resources: int) -> None:
        """Draw the maps: the ground, what grows on it, and the cells where agents may begin."""
        device, cells = self._agent.device, torch.arange(size * size, device=self._agent.device)
        # Counters below zero, which no step of the clock reaches.
        where = (self.seed, draws.STREAM_WORLD, self._number[:, None])
        wall = draws.below(100, *where, -1 - 2 * cells) < walls
        grows = ~wall & (draws.below(100, *where, -2 - 2 * cells) < resources)
        rim = (VIEW, VIEW, VIEW, VIEW)
        pad = torch.nn.functional.pad
        ground = pad(torch.where(wall, WALL, 0).unflatten(1, (size, size)), rim, value=WALL)
        fresh = pad(torch.where(grows, LONG, -1).unflatten(1, (size, size)), rim, value=-1)
        self._ground, self._fresh = ground.flatten(1).int(), fresh.flatten(1).int()
        self._blocked = self._ground.flatten() != 0
        # Free cells in a random order, walls behind them.
        order = torch.where(wall, 2**62, draws.bits(*where, -3 - 2 * size * size - cells) >> 2).argsort(1)
        self._free = (~wall).sum(1, keepdim=True).clamp(min=1)
        width = size + 2 * VIEW
        inside = (order // size + VIEW) * width + order % size + VIEW
        self._spots = inside + self._map[:, None] * width * width
        self._slot = torch.arange(CROWD, device=device)
        self._left, self._turn = torch.zeros_like(self._free, dtype=torch.int32), torch.zeros_like(self._free)
        self._at, self._ripe = self._spots[:, :CROWD].clone(), self._fresh.clone()

    def _look_out(self, width: int) -> None:
        """Write down what lies where around an agent: the cells it sees and steps on, and who goes first."""
        device = self._agent.device
        window = [(row, column) for row in range(2 * VIEW + 1) for column in range(2 * VIEW + 1)]
        steps = [(r - VIEW) * width + c - VIEW for r, c in window]
        # Half as wide as places, and read faster: there are 121 for each agent.
        self._window = torch.tensor(steps, dtype=torch.int32, device=device)
        places = [tokens.pack_location(r, c) for r, c in window]
        self._places = torch.tensor(places, dtype=torch.int32, device=device)
        self._moves = torch.tensor([0, *(r * width + c for r, c in MOVES.values())], device=device)
        self._earlier = torch.ones(CROWD, CROWD, dtype=torch.bool, device=device).tril(-1)

    def return_at_most(self, episodes: int) -> float:
        """Bound the mean return of every agent's first `episodes` episodes from above.

        Something that grows is taken at most once in any `regrow` steps, and nobody takes more than one thing
        a step. So of a map where n things grow, 24 agents take at most min(n, 24 r) in any r <= regrow steps
        that follow each other. An episode is whole stretches of `regrow` steps and a shorter one: its crowd
        takes at most the sum of these, and the mean return of its agents is at most that over 24. Ways
        are not counted, so the best return is lower. First episodes are as short as `first_lengths` says.
        """
        first, whole = self.first_lengths(), torch.full_like(self._map, self.length)
        crowds = self._taken_at_most(first) + (episodes - 1) * self._taken_at_most(whole)
        return float(crowds.double().mean()) / CROWD / episodes

    def first_lengths(self) -> Int[Tensor, " maps"]:
        """Say how many steps the first episode of each map has."""
        return 1 + draws.below(self.length, self.seed, draws.STREAM_WORLD, self._number, 0)

    def _taken_at_most(self, steps: Int[Tensor, " maps"]) -> Int[Tensor, " maps"]:
        """Bound what each map's crowd takes in an episode of so many steps."""
        grows = (self._fresh > 0).sum(1)
        stretches, rest = steps // self.regrow, steps % self.regrow
        return stretches * grows.clamp(max=CROWD * self.regrow) + torch.minimum(grows, CROWD * rest)

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        crowd = who.unflatten(0, (-1, CROWD))[:, :1]
        # In place, here and below: what is written where it was read needs no copy.
        if self._opening:
            self._left.copy_(self.first_lengths()[:, None])
            self._turn.copy_(draws.below(LONG, self.seed, draws.STREAM_WORLD, self._number[:, None], 1))
        else:
            self._left.masked_fill_(crowd, self.length)
            self._turn.add_(crowd, alpha=CROWD)
        spot = self._spots.gather(1, (self._turn + self._slot) % self._free)
        torch.where(crowd, spot, self._at, out=self._at)
        torch.where(crowd, self._fresh, self._ripe, out=self._ripe)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        there = self._at + self._moves[actions.long()].view_as(self._at)
        torch.where(self._blocked[there], self._at, there, out=self._at)
        self._left -= 1
        flat, at = self._ripe.view(-1), self._at.flatten()
        since = flat[at].view_as(self._at)
        ripe = since >= self._left
        # All who share a cell write the same there, in whatever order.
        flat.scatter_(0, at, torch.where(ripe, self._left - self.regrow, since).flatten())
        taken = ((self._at[:, :, None] == self._at[:, None, :]) & self._earlier).any(2)
        return Told((ripe & ~taken).flatten(), (self._left == 0).expand(-1, CROWD).flatten())

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        seen = torch.where(self._ripe >= self._left, RESOURCE, self._ground).view(-1)
        seen.scatter_(0, self._at.flatten(), AGENT)
        around = self._at.flatten().int()[:, None] + self._window
        # Three times as fast on the CPU as seen[around].
        cells = seen.index_select(0, around.view(-1)).view_as(around)
        return tokens.pack(cells, self._places, self.spec.obs_shape[0])
