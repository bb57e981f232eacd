"""An AsyncWorld that returns its agents in random order, made of one world per environment."""

import random

import torch

from holdfast.worlds import make_world
from holdfast.worlds.step import PartialStep, concat


class Turning:
    """A world by name, one shard per environment; `recv` returns stepping ones in random order."""

    def __init__(self, name, agents, *, seed=0, chance=0, crowd=1, together=3, **options):
        starts = range(0, agents, crowd)
        self.worlds = {start: make_world(name, crowd, seed=seed, **options) for start in starts}
        for start, world in self.worlds.items():
            world.set_agent_offset(start)
        self.agents, self.spec, self.crowd = agents, self.worlds[0].spec, crowd
        self._draw, self._together = random.Random(chance), together
        groups = [list(starts)[at : at + together] for at in range(0, len(starts), together)]
        self.groups = tuple(self._rows(group) for group in groups)
        self._stepping = {}

    def _rows(self, starts):
        return torch.cat([torch.arange(start, start + self.crowd) for start in starts])

    def reset(self):
        self._stepping = {}
        steps = [PartialStep(self._rows([start]), world.reset()) for start, world in self.worlds.items()]
        return concat(steps)

    def step(self, actions):
        for rows in self.groups:
            self.send(rows, actions[rows])
        steps, received = [], 0
        while received < self.agents:
            steps.append(self.recv())
            received += len(steps[-1].rows)
        return concat(steps)

    def send(self, rows, actions):
        for start, acts in zip(rows[:: self.crowd].tolist(), actions.split(self.crowd), strict=True):
            assert start not in self._stepping, "sent twice"
            self._stepping[start] = acts

    def recv(self):
        count = self._draw.randint(1, min(self._together, len(self._stepping)))
        # Out of order: rows of a partial step need not be sorted.
        starts = self._draw.sample(sorted(self._stepping), count)
        steps = [
            PartialStep(
                torch.arange(self.crowd) + number * self.crowd,
                self.worlds[start].step(self._stepping.pop(start)),
            )
            for number, start in enumerate(starts)
        ]
        return PartialStep(self._rows(starts), concat(steps))
