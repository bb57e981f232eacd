"""`forage`: the goal hides at the end of one of some arms, and stays there for several trials."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.embedded import FULL, Embedded, Told, require
from holdfast.worlds.maze import HERE, MOVES, leads_to, walls_around
from holdfast.worlds.step import Feature, WorldSpec

TOKENS = 10
"""Eight walls, the arm and the goal."""


def best_with_memory(arms: int, trials: int) -> float:
    """Add up what trying the arms one by one pays, and staying with the goal once it is found.

    The goal is in any arm with the same chance, and a trial tells of one arm, so no plan finds it in the
    j-th trial more often than in 1 of `arms` cases, for j up to `arms`; found, it pays in every later trial.
    """
    found_in = range(1, min(arms, trials) + 1)
    return sum(trials - j + 1 for j in found_in) / arms / trials


class Forage(Embedded):
    """From a hub `arms` arms lead out, `reach` cells each; at the end of one of them is the goal.

    It is seen only from its cell, stays where it is for the episode, and is hidden anew for the next one.
    A trial is a way to the end of an arm: reaching the goal pays 1/trials, and from the end of any arm the
    next step leads back to the hub, whatever is done: a new trial begins (`trial`). An episode lasts
    trials * (reach + 1) steps: time for `trials` trials for who does not dawdle. Each arm shows its name,
    since a policy does not see its own actions.

    With memory across trials the best return is `best_with_memory`: 0.8125 for 4 arms and 8 trials. Without
    it, or if memory is cleared by `memory.clear_on=trial`, it is 1/arms: up to the end of an arm nothing
    that is seen depends on where the goal is, and there what is done does not matter; so each of at most
    `trials` trials finds the goal with chance 1/arms, however the arm is chosen. Episodes are not shortened
    to put agents out of step, since the best return depends on the number of trials.
    """

    def __init__(
        self,
        agents: int,
        *,
        arms: int = 4,
        reach: int = 2,
        trials: int = 8,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.arms, self.reach = require("arms", arms, 2, 4), require("reach", reach, 1, 1000)
        self.trials = require("trials", trials, 1, 1000)
        names = [f"arm_{name.removeprefix('move_')}" for name in list(MOVES)[:arms]]
        spec = WorldSpec(
            obs_shape=(TOKENS, 3),
            action_names=tuple(MOVES),
            features=(
                Feature("wall", 1.0),
                Feature("goal", float(FULL)),
                *(Feature(name, float(FULL)) for name in names),
            ),
            best_return=best_with_memory(arms, trials),
            best_return_without_memory=1.0 / arms,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        ways = list(MOVES.values())[:arms]
        cells = [(0, 0), *((d * r, d * c) for d in range(1, reach + 1) for r, c in ways)]
        self._next = torch.tensor(leads_to(cells), device=device)
        walls = walls_around(cells, 0)
        shown = [[*walls[n], *([[HERE, 2 + (n - 1) % arms, FULL]] if n else [])] for n in range(len(cells))]
        # Without the goal, and with it.
        self._views = self._rows([*shown, *([*row, [HERE, 1, FULL]] for row in shown)])
        # Cells go outwards, arm by arm: the last ones are the ends.
        self._ends, self._cells = len(cells) - arms, len(cells)
        self._cell = self._goal = self._left = torch.zeros_like(self._agent)

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        self._goal = torch.where(who, self._ends + self._below(self.arms), self._goal)
        self._cell = torch.where(who, 0, self._cell)
        self._left = torch.where(who, self.trials * (self.reach + 1), self._left)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        back = self._cell >= self._ends
        self._cell = torch.where(back, 0, self._next[self._cell, actions.long()])
        self._left = self._left - 1
        ended = self._left == 0
        return Told((self._cell == self._goal) / self.trials, ended, trial=back & ~ended)

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._cell + self._cells * (self._cell == self._goal)]
