"""`tmaze`: a cue at the start of a corridor says which of two equal arms at its end is the good one."""

import torch

from holdfast.errors import ConfigError
from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.embedded import FULL, Embedded, Told, require
from holdfast.worlds.maze import HERE, MOVES, leads_to, walls_around
from holdfast.worlds.step import Feature, WorldSpec

TOKENS = 9
"""Eight walls and a cue."""


class TMaze(Embedded):
    """Walk east through `corridor` cells to a junction, and into the arm that the cue at the start told.

    Walls are seen one cell far; the cue is seen on the start cell only, and the arms look alike. The good
    arm pays 1, the other one -1, and so does being in no arm after `limit` steps; the episode ends there.
    The best return is 1.0.

    Without memory it is 0.0. Away from the start nothing that is seen depends on the cue, so every visit of
    the junction leads north or south with chances that are the same for both cues: of the episodes that end
    in an arm, a share p ends in the north, whatever the cue. Let an arm be reached with chance s when the
    cue says north and s' when it says south. The mean return is
    (s (2p - 1) - (1 - s) + s' (1 - 2p) - (1 - s')) / 2 = s p + s' (1 - p) - 1 <= 0, and always going to the
    same arm gets 0. (If staying away cost nothing, "go north, or stay home if the cue says south" would get
    1/2.)
    """

    def __init__(
        self,
        agents: int,
        *,
        corridor: int = 4,
        limit: int = 20,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.corridor = require("corridor", corridor, 1, 1000)
        if limit < corridor + 1:
            raise ConfigError(
                f"world.limit={limit}: the way is {corridor + 1} steps; give a number from there on."
            )
        spec = WorldSpec(
            obs_shape=(TOKENS, 3),
            action_names=tuple(MOVES),
            features=(
                Feature("wall", 1.0),
                Feature("cue_north", float(FULL)),
                Feature("cue_south", float(FULL)),
            ),
            best_return=1.0,
            best_return_without_memory=0.0,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        self._limit, self._north = limit, corridor + 1
        cells = [(0, step) for step in range(corridor + 1)] + [(-1, corridor), (1, corridor)]
        self._next = torch.tensor(leads_to(cells), device=device)
        walls = walls_around(cells, 0)
        # What is seen in each cell; then on the start cell, by cue.
        self._views = self._rows([*walls, *([*walls[0], [HERE, 1 + cue, FULL]] for cue in range(2))])
        self._cell = self._cue = self._left = torch.zeros_like(self._agent)

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        self._cue = torch.where(who, self._below(2), self._cue)
        self._cell = torch.where(who, 0, self._cell)
        self._left = torch.where(who, self._limit, self._left)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        self._cell = self._next[self._cell, actions.long()]
        self._left = self._left - 1
        arrived = self._cell >= self._north
        ended = arrived | (self._left == 0)
        good = self._cell == self._north + self._cue
        return Told(torch.where(good, 1, -1) * ended, ended)

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        cue = self._north + 2 + self._cue
        return self._views[torch.where(self._cell == 0, cue, self._cell)]
