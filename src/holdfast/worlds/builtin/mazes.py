"""TMaze, Forage, and their transition and view tables."""

from collections.abc import Sequence

import torch

from holdfast.errors import ConfigError
from holdfast.types import Bool, Int, Tensor, UInt8
from holdfast.worlds.step import Feature, GridView, WorldSpec
from holdfast.worlds.tensor_world import FULL, MOVES, Device, GridCell, Outcome, TensorWorld, require
from holdfast.worlds.tokens import pack_location

HERE = pack_location(5, 5)
"""The centre of the window: the cell of the agent."""
AROUND = [(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1) if (row, column) != (0, 0)]


def next_cells(cells: Sequence[GridCell]) -> list[list[int]]:
    """Return the next cell for each open cell and move; moving into a wall stays."""
    number = {cell: n for n, cell in enumerate(cells)}
    return [[number.get((r + dr, c + dc), number[r, c]) for dr, dc in MOVES.values()] for r, c in cells]


def walls_around(cells: Sequence[GridCell], feature: int) -> list[list[list[int]]]:
    """Return the tokens of the walls among the eight neighbours of each open cell."""
    return [
        [[pack_location(5 + dr, 5 + dc), feature, 1] for dr, dc in AROUND if (row + dr, column + dc) not in cells]
        for row, column in cells
    ]


def walled_grid(cells: Sequence[GridCell]) -> tuple[Int[Tensor, "R C"], Int[Tensor, "N 2"]]:
    """Return the grid of some open cells within walls, 0 open and 1 wall, and the place of each cell on it."""
    places = torch.tensor(cells)
    places = places - places.amin(0) + 1
    grid = torch.ones(*(places.amax(0) + 2).tolist(), dtype=torch.long)
    grid[places[:, 0], places[:, 1]] = 0
    return grid, places


def with_marks(
    grid: Int[Tensor, "R C"], places: Int[Tensor, "N 2"], *marks: tuple[Tensor, Tensor | int]
) -> Int[Tensor, "A R C"]:
    """Return a copy of the grid per agent, with marks: the cell of each agent's mark, and its kind."""
    agents = torch.arange(len(marks[0][0]))
    grids = grid.repeat(len(agents), 1, 1)
    for cell, kind in marks:
        row, column = places[cell.cpu()].unbind(1)
        grids[agents, row, column] = torch.as_tensor(kind).cpu()
    return grids


TMAZE_TOKENS = 9
"""Eight walls and a cue."""


class TMaze(TensorWorld):
    """Walk east through `corridor` cells to a junction, and into the arm that the cue at the start names.

    Adjacent walls are visible; the cue is visible on the start cell only, and the arms look alike. The named
    arm pays 1, the other one -1, and so does being in no arm after `limit` steps; the episode ends there.
    The best return is 1.0.

    Without memory it is 0.0. Away from the start no observation depends on the cue, so every visit of the
    junction leads north or south with the same probabilities for both cues: of the episodes that end in an
    arm, a fraction p ends in the north, for either cue. Let an arm be reached with probability s when the
    cue is north and s' when it is south. The mean return is
    (s (2p - 1) - (1 - s) + s' (1 - 2p) - (1 - s')) / 2 = s p + s' (1 - p) - 1 <= 0, and always going to the
    same arm gets 0. (If reaching no arm cost nothing, "go north, or stay if the cue is south" would get 1/2.)
    """

    def __init__(
        self, agents: int, *, corridor: int = 4, limit: int = 20, seed: int = 0, device: Device = "cpu"
    ) -> None:
        require("corridor", corridor, 1, 1000)
        if limit < corridor + 1:
            raise ConfigError(f"world.limit={limit}: the arms are {corridor + 1} steps away; give at least that.")
        spec = WorldSpec(
            obs_shape=(TMAZE_TOKENS, 3),
            action_names=tuple(MOVES),
            features=(Feature("wall", 1.0), Feature("cue_north", float(FULL)), Feature("cue_south", float(FULL))),
            best_return=1.0,
            best_return_without_memory=0.0,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        self._limit, self._north = limit, corridor + 1
        cells = [(0, step) for step in range(corridor + 1)] + [(-1, corridor), (1, corridor)]
        self._open_cells = cells
        self._next = torch.tensor(next_cells(cells), device=device)
        walls = walls_around(cells, 0)
        # One view per cell; then the start cell, one per cue.
        self._views = self._rows([*walls, *([*walls[0], [HERE, 1 + cue, FULL]] for cue in range(2))])
        self._cell = self._cue = self._left = torch.zeros_like(self._agent)

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        self._cue = torch.where(mask, self._randint(2), self._cue)
        self._cell = torch.where(mask, 0, self._cell)
        self._left = torch.where(mask, self._limit, self._left)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        self._cell = self._next[self._cell, actions.long()]
        self._left = self._left - 1
        arrived = self._cell >= self._north
        ended = arrived | (self._left == 0)
        good = self._cell == self._north + self._cue
        return Outcome(torch.where(good, 1, -1) * ended, ended)

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        cue = self._north + 2 + self._cue
        return self._views[torch.where(self._cell == 0, cue, self._cell)]

    def grid_view(self) -> GridView:
        """Return each agent's maze, with its cue and the arm that pays."""
        grid, places = walled_grid(self._open_cells)
        start = torch.zeros_like(self._cue)
        cells = with_marks(grid, places, (start, 2 + self._cue), (self._north + self._cue, 4))
        return GridView(("floor", "wall", "cue_north", "cue_south", "goal"), cells, places[self._cell.cpu()])


FORAGE_TOKENS = 10
"""Eight walls, the arm and the goal."""


def best_with_memory(arms: int, trials: int) -> float:
    """Return the mean return of trying the arms one by one, then staying with the goal.

    The goal is in each arm with the same probability, and a trial reveals one arm, so no plan finds it in the
    j-th trial with probability above 1/arms, for j up to `arms`; from then on it pays in every trial.
    """
    return sum(trials - j + 1 for j in range(1, min(arms, trials) + 1)) / arms / trials


class Forage(TensorWorld):
    """`arms` arms of `reach` cells lead out of a hub; at the end of one of them is the goal.

    The goal is visible only on its cell, stays there for the episode, and is drawn again for the next one. A trial is a
    walk to the end of an arm: reaching the goal pays 1/trials, and from the end of any arm every action leads back to
    the hub, where a new trial starts (`trial`). An episode has trials * (reach + 1) steps, enough for `trials` shortest
    walks. Each arm shows its name, since a policy does not observe its own actions.

    With memory across trials the best return is `best_with_memory`: 0.8125 for 4 arms and 8 trials. Without
    it, or with `memory.clear_on=trial`, it is 1/arms: before the end of an arm no observation depends on the
    goal, and there the action has no effect; so each of at most `trials` trials finds the goal with
    probability 1/arms, however the arm is chosen. First episodes are not shortened to put agents out of
    phase, since the best return depends on the number of trials.
    """

    def __init__(
        self, agents: int, *, arms: int = 4, reach: int = 2, trials: int = 8, seed: int = 0, device: Device = "cpu"
    ) -> None:
        self.arms, self.reach = require("arms", arms, 2, 4), require("reach", reach, 1, 1000)
        self.trials = require("trials", trials, 1, 1000)
        arm_names = [f"arm_{name.removeprefix('move_')}" for name in list(MOVES)[:arms]]
        spec = WorldSpec(
            obs_shape=(FORAGE_TOKENS, 3),
            action_names=tuple(MOVES),
            features=(Feature("wall", 1.0), *(Feature(name, float(FULL)) for name in ("goal", *arm_names))),
            best_return=best_with_memory(arms, trials),
            best_return_without_memory=1.0 / arms,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        ways = list(MOVES.values())[:arms]
        cells = [(0, 0), *((d * r, d * c) for d in range(1, reach + 1) for r, c in ways)]
        self._open_cells = cells
        self._next = torch.tensor(next_cells(cells), device=device)
        walls = walls_around(cells, 0)
        views = [[*walls[n], *([[HERE, 2 + (n - 1) % arms, FULL]] if n else [])] for n in range(len(cells))]
        # Without the goal, and with it.
        self._views = self._rows([*views, *([*view, [HERE, 1, FULL]] for view in views)])
        # Cells are ordered by distance from the hub: the last ones are the ends of the arms.
        self._ends, self._cells = len(cells) - arms, len(cells)
        self._cell = self._goal = self._left = torch.zeros_like(self._agent)

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        self._goal = torch.where(mask, self._ends + self._randint(self.arms), self._goal)
        self._cell = torch.where(mask, 0, self._cell)
        self._left = torch.where(mask, self.trials * (self.reach + 1), self._left)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        back = self._cell >= self._ends
        self._cell = torch.where(back, 0, self._next[self._cell, actions.long()])
        self._left = self._left - 1
        ended = self._left == 0
        return Outcome((self._cell == self._goal) / self.trials, ended, trial=back & ~ended)

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._cell + self._cells * (self._cell == self._goal)]

    def grid_view(self) -> GridView:
        """Return each agent's arms, with the goal."""
        grid, places = walled_grid(self._open_cells)
        return GridView(("floor", "wall", "goal"), with_marks(grid, places, (self._goal, 2)), places[self._cell.cpu()])
