"""Arena: 24 agents per map collect resources that regrow, each with an 11 x 11 view; measures throughput."""

import torch

from holdfast import rng
from holdfast.errors import ConfigError
from holdfast.types import Bool, Int, Tensor, UInt8
from holdfast.worlds import tokens
from holdfast.worlds.step import Feature, GridView, WorldSpec, check_agent_count
from holdfast.worlds.tensor_world import MOVES, Device, Outcome, TensorWorld, require

AGENTS_PER_MAP = 24
VIEW = 5
"""Radius of the view; maps have a border of walls of this width, so that no view crosses an edge."""
WALL, RESOURCE, AGENT = (tokens.word(feature, 1) for feature in range(3))
LONG = 2**30
"""More than the steps of any episode."""


class Arena(TensorWorld):
    """24 agents walk on each map of `size` x `size` cells; stepping on a ripe resource pays 1.

    `walls` percent of the cells are walls, and `resources` percent of the others have a resource, which is
    ripe again `regrow` steps after it was taken. Agents may share a cell; the one with the lowest number
    takes the resource. Observations are the cells up to 5 away, row by row, up to `sight` tokens. All agents
    of a map start and end together after `length` steps, on free cells in a random order; shorter first
    episodes put the maps out of phase. `agents` is a multiple of 24. With `truncate`, episodes end by
    truncation, at the cost of a second observation per step.

    It measures speed, not memory: the best return depends on 24 agents and the map, and is unknown. It lies between
    that of a scripted player and a bound (`Gathers` and `arena_return_at_most` of tests/helpers/oracles.py). An agent's
    row depends on its map only, not on the number of maps.

    Time is counted in remaining steps: a cell is ripe if its number is at least the remaining steps.
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
        device: Device = "cpu",
    ) -> None:
        check_agent_count("arena", agents, AGENTS_PER_MAP)
        require("size", size, 12, 1000)
        require("walls", walls, 0, 50)
        require("resources", resources, 0, 100)
        self.length, self.regrow = require("length", length, 1, LONG), require("regrow", regrow, 1, LONG)
        spec = WorldSpec(
            obs_shape=(require("sight", sight, 1, 1000), 3),
            action_names=("noop", *MOVES),
            features=(Feature("wall", 1.0), Feature("resource", 1.0), Feature("agent", 1.0)),
            truncates="always" if truncate else "never",
            agents_per_env=AGENTS_PER_MAP,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        # The number that seeds a map; in a shard of a larger world it is not the row.
        self._number, self._sizes = torch.arange(agents // AGENTS_PER_MAP, device=device), (size, walls, resources)
        self._draw_maps(*self._sizes)
        self._make_tables(size + 2 * VIEW)

    def set_agent_offset(self, first_agent: int) -> None:
        """Draw the maps of these agents in a larger world; call it before `reset()`."""
        super().set_agent_offset(first_agent)
        if first_agent % AGENTS_PER_MAP:
            raise ConfigError(f"A shard of arena starts at a multiple of {AGENTS_PER_MAP}, not at agent {first_agent}.")
        self._number = self._number + first_agent // AGENTS_PER_MAP
        self._draw_maps(*self._sizes)

    def _draw_maps(self, size: int, walls: int, resources: int) -> None:
        """Draw walls, resources and start cells."""
        device, cells = self._agent.device, torch.arange(size * size, device=self._agent.device)
        # Negative counters, which the clock never reaches.
        stream = (self.seed, rng.STREAM_WORLD, self._number[:, None])
        wall = rng.randint(100, *stream, -1 - 2 * cells) < walls
        grows = ~wall & (rng.randint(100, *stream, -2 - 2 * cells) < resources)
        border = (VIEW, VIEW, VIEW, VIEW)
        pad = torch.nn.functional.pad
        ground = pad(torch.where(wall, WALL, 0).unflatten(1, (size, size)), border, value=WALL)
        fresh = pad(torch.where(grows, LONG, -1).unflatten(1, (size, size)), border, value=-1)
        self._ground, self._fresh = ground.flatten(1).int(), fresh.flatten(1).int()
        self._blocked = self._ground.flatten() != 0
        # Free cells in a random order, then walls.
        keys = rng.random_bits(*stream, -3 - 2 * size * size - cells) >> 2
        order = torch.where(wall, 2**62, keys).argsort(1)
        self._free = (~wall).sum(1, keepdim=True).clamp(min=1)
        width = size + 2 * VIEW
        # Cells are numbered within their map, so that a saved map can move to another shard.
        self._spots = (order // size + VIEW) * width + order % size + VIEW
        self._slot = torch.arange(AGENTS_PER_MAP, device=device)
        self._left, self._turn = torch.zeros_like(self._free, dtype=torch.int32), torch.zeros_like(self._free)
        self._at, self._ripe = self._spots[:, :AGENTS_PER_MAP].clone(), self._fresh.clone()

    def _make_tables(self, width: int) -> None:
        """Make the tables of offsets in the view and of moves, and the precedence of agents."""
        device = self._agent.device
        window = [(row, column) for row in range(2 * VIEW + 1) for column in range(2 * VIEW + 1)]
        steps = [(r - VIEW) * width + c - VIEW for r, c in window]
        # int32, which is read faster than int64: there are 121 per agent.
        self._window = torch.tensor(steps, dtype=torch.int32, device=device)
        places = [tokens.pack_location(r, c) for r, c in window]
        self._places = torch.tensor(places, dtype=torch.int32, device=device)
        self._moves = torch.tensor([0, *(r * width + c for r, c in MOVES.values())], device=device)
        self._earlier = torch.ones(AGENTS_PER_MAP, AGENTS_PER_MAP, dtype=torch.bool, device=device).tril(-1)

    def first_lengths(self) -> Int[Tensor, " maps"]:
        """Return the length of the first episode of each map."""
        return 1 + rng.randint(self.length, self.seed, rng.STREAM_WORLD, self._number, 0)

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        maps = mask.unflatten(0, (-1, AGENTS_PER_MAP))[:, :1]
        # In place, here and below, which saves copies.
        if self._opening:
            self._left.copy_(self.first_lengths()[:, None])
            self._turn.copy_(rng.randint(LONG, self.seed, rng.STREAM_WORLD, self._number[:, None], 1))
        else:
            self._left.masked_fill_(maps, self.length)
            self._turn.add_(maps, alpha=AGENTS_PER_MAP)
        spot = self._spots.gather(1, (self._turn + self._slot) % self._free)
        torch.where(maps, spot, self._at, out=self._at)
        torch.where(maps, self._fresh, self._ripe, out=self._ripe)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        target, offset = self._at + self._moves[actions.long()].view_as(self._at), self._offsets()
        torch.where(self._blocked[target + offset], self._at, target, out=self._at)
        self._left -= 1
        flat, at = self._ripe.view(-1), (self._at + offset).flatten()
        since = flat[at].view_as(self._at)
        ripe = since >= self._left
        # Agents that share a cell write the same value, so the order does not matter.
        flat.scatter_(0, at, torch.where(ripe, self._left - self.regrow, since).flatten())
        taken = ((self._at[:, :, None] == self._at[:, None, :]) & self._earlier).any(2)
        return Outcome((ripe & ~taken).flatten(), (self._left == 0).expand(-1, AGENTS_PER_MAP).flatten())

    def _offsets(self) -> Int[Tensor, "maps 1"]:
        """Return the number of each map's first cell among the cells of all maps."""
        maps, cells = self._ripe.shape
        return torch.arange(0, maps * cells, cells, device=self._ripe.device)[:, None]

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        maps = torch.where(self._ripe >= self._left, RESOURCE, self._ground).view(-1)
        at = (self._at + self._offsets()).flatten()
        maps.scatter_(0, at, AGENT)
        view = at.int()[:, None] + self._window
        # Three times as fast on the CPU as maps[view].
        cells = maps.index_select(0, view.view(-1)).view_as(view)
        return tokens.pack(cells, self._places, self.spec.obs_shape[0])

    def grid_view(self) -> GridView:
        """Return the maps with one row of walls around them, ripe resources and places where one grows."""
        width = self._sizes[0] + 2 * VIEW
        kinds = torch.where(self._ground == WALL, 1, torch.where(self._fresh == LONG, 2, 0))
        kinds = torch.where(self._ripe >= self._left, 3, kinds).unflatten(1, (width, width))
        inside = slice(VIEW - 1, width - VIEW + 1)
        places = torch.stack([self._at // width, self._at % width], dim=-1).flatten(0, 1) - (VIEW - 1)
        return GridView(("floor", "wall", "growing", "resource"), kinds[:, inside, inside].cpu(), places.cpu())
