"""A world whose agents are told things in any order, made of small worlds with one crowd each."""

import random

import torch

from holdfast.worlds import make_world
from holdfast.worlds.turns import Turn, joined


class Turning:
    """Agents of a world by name, a share each; who was answered is told what came of it in a drawn order."""

    def __init__(self, name, agents, *, seed=0, chance=0, crowd=1, together=3, **options):
        starts = range(0, agents, crowd)
        self.worlds = {start: make_world(name, crowd, seed=seed, **options) for start in starts}
        for start, world in self.worlds.items():
            world.count_from(start)
        self.agents, self.spec, self.crowd = agents, self.worlds[0].spec, crowd
        self._draw, self._together = random.Random(chance), together
        groups = [list(starts)[at : at + together] for at in range(0, len(starts), together)]
        self.shares = tuple(self._rows(group) for group in groups)
        self._acting = {}

    def _rows(self, starts):
        return torch.cat([torch.arange(start, start + self.crowd) for start in starts])

    def reset(self):
        self._acting = {}
        told = [Turn(self._rows([start]), world.reset()) for start, world in self.worlds.items()]
        return joined(told)

    def step(self, actions):
        for rows in self.shares:
            self.answer(rows, actions[rows])
        turns, told = [], 0
        while told < self.agents:
            turns.append(self.turn())
            told += len(turns[-1].rows)
        return joined(turns)

    def answer(self, rows, actions):
        for start, acts in zip(rows[:: self.crowd].tolist(), actions.split(self.crowd), strict=True):
            assert start not in self._acting, "answered twice"
            self._acting[start] = acts

    def turn(self):
        count = self._draw.randint(1, min(self._together, len(self._acting)))
        who = self._draw.sample(sorted(self._acting), count)
        # Out of order: the rows of a turn lie anywhere.
        told = [(start, self.worlds[start].step(self._acting.pop(start))) for start in who]
        place = {start: number for number, start in enumerate(who)}
        turns = [Turn(torch.arange(self.crowd) + place[start] * self.crowd, step) for start, step in told]
        return Turn(self._rows(who), joined(turns))
