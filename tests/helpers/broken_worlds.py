"""Worlds that break one law each, for tests of the check: wrappers around correct worlds."""

import copy
import itertools
import random
from dataclasses import replace

import numpy as np
import torch

from helpers.space_worlds import SayNumber
from holdfast.worlds import make_world

BORN = itertools.count()


def changed(step, **fields):
    """Change a step without asking whether it may be so."""
    other = copy.copy(step)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other


class Around:
    """A wrapper of a world; steps go through `tell`, actions through `do`."""

    def __init__(self, world):
        self.world, self.agents, self.spec = world, world.agents, world.spec
        self.clock, self.before, self.resets = 0, None, 0

    def reset(self):
        self.clock, self.before, self.resets = 0, None, self.resets + 1
        return self._change(self.world.reset())

    def step(self, actions):
        self.clock += 1
        return self._change(self.world.step(self.do(actions)), actions)

    def _change(self, step, actions=None):
        result = self.tell(step, actions)
        self.before = step
        return result

    def do(self, actions):
        return actions

    def tell(self, step, actions):
        return step


def telling(tell, name="ragged", **options):
    """Make worlds with changed steps: `tell(self, step, actions)` returns a dict of the changed fields."""

    class Changed(Around):
        def tell(self, step, actions):
            return changed(step, **tell(self, step, actions))

    options = {"truncate": True, **options}
    return lambda agents, seed: Changed(make_world(name, agents=agents, seed=seed, **options))


def other_spec(make, **fields):
    def made(agents, seed):
        world = make(agents, seed)
        world.spec = replace(world.spec, **fields)
        return world

    return made


def recall(agents, seed, **options):
    return make_world("recall", agents=agents, seed=seed, **{"delay": 3, **options})


def none_of(flag):
    return torch.zeros_like(flag)


def first_late(self, step, actions):
    return {"first": none_of(step.first) if self.before is None else self.before.first}


def no_first_later(self, step, actions):
    return {} if self.clock == 0 else {"first": none_of(step.first)}


def no_first_at_reset(self, step, actions):
    return {"first": none_of(step.first)} if self.clock == 0 else {}


def no_first_at_second_reset(self, step, actions):
    return {"first": none_of(step.first)} if self.clock == 0 and self.resets > 1 else {}


def ends_of_every(self, step, actions):
    """Every fourth agent forgets its ends."""
    return {"truncated": step.truncated & (torch.arange(self.agents) % 4 > 0)}


def end_twice(self, step, actions):
    """The end flag is set once more while the agent is invalid."""
    again = none_of(step.first) if self.before is None else self.before.truncated & ~step.valid
    return {"truncated": step.truncated | again}


def pays_the_dead(self, step, actions):
    return {"reward": step.reward + (~step.valid & ~step.truncated)}


def nobody_begins(self, step, actions):
    return {"valid": step.valid & ~step.first}


def paid_at_reset(self, step, actions):
    return {"reward": step.reward + (self.clock == 0)}


def hears_the_dead(self, step, actions):
    """Actions of invalid agents are rewarded when they are valid again."""
    if self.before is None:
        self.action_sum = torch.zeros(self.agents)
    else:
        self.action_sum = self.action_sum + torch.where(self.before.valid, 0, actions)
    back = none_of(step.valid) if self.before is None else self.before.valid
    return {"reward": step.reward + torch.where(back, 0.01 * self.action_sum, 0.0)}


def last_is_next_first(self, step, actions):
    return {"last_obs": step.obs}


def last_is_stale(self, step, actions):
    return {} if self.before is None else {"last_obs": self.before.obs}


def last_is_elsewhere(self, step, actions):
    last = step.last_obs.clone()
    last[:, 0] = torch.tensor([254, 77, 1])
    return {"last_obs": last}


def feels_a_neighbour(self, step, actions):
    return {} if actions is None else {"reward": step.reward + 0.5 * actions.roll(1)}


def feels_the_first(self, step, actions):
    return {} if actions is None else {"reward": step.reward + 0.5 * actions[0]}


def hidden_buffer(name):
    """One of the tensors is the same one each time."""

    def tell(self, step, actions):
        value = getattr(step, name)
        if self.clock == 0 and self.resets == 1:
            self.room = value.clone()
        return {name: self.room.copy_(value)}

    return tell


class Scribbles(Around):
    def do(self, actions):
        own = actions.clone()
        actions.zero_()
        return own


class Raises(Around):
    def do(self, actions):
        if self.clock == 37:
            raise ValueError("agent 3 fell off\nthe table")
        return actions


class Mute(Around):
    def tell(self, step, actions):
        return tuple(vars(step).values())


class GoesOn(Around):
    """Another reset starts other episodes, as with a generator that is not reseeded."""

    def reset(self):
        self.world.seed = self.world.seed + 1000 * self.resets
        return super().reset()


class Shared(Around):
    """Draws from a generator that the whole program shares."""

    def __init__(self, world, draw):
        super().__init__(world)
        self.draw = draw

    def tell(self, step, actions):
        return changed(step, reward=step.reward + 0.001 * self.draw() if self.clock else step.reward)


def token(place, *bytes_):
    """A token of agent 5 is another one."""

    def tell(self, step, actions):
        obs = step.obs.clone()
        obs[5, place] = torch.tensor(bytes_, dtype=torch.uint8)
        return {"obs": obs}

    return tell


class Loud(SayNumber):
    def show(self, first, at_query):
        return 1.5 * super().show(first, at_query)


class NotANumber(SayNumber):
    def show(self, first, at_query):
        return super().show(first, at_query) * (float("nan") if at_query else 1.0)


class Wide(SayNumber):
    def show(self, first, at_query):
        return torch.cat([super().show(first, at_query)] * 2, dim=-1)


def made(kind):
    return lambda agents, seed: kind(agents, seed=seed)


SABOTAGES = {
    "first late by one": (telling(first_late), {"first", "flags"}, "first after reset"),
    "first forgotten": (telling(no_first_later), {"flags"}, "valid rows after an end"),
    "first forgotten at reset": (telling(no_first_at_reset), {"first"}, "first everywhere in reset()"),
    "first forgotten at the next reset": (
        telling(no_first_at_second_reset),
        {"first"},
        "middle of an episode",
    ),
    "flags forgotten": (
        telling(lambda self, step, actions: {"truncated": none_of(step.first)}),
        {"flags"},
        "firsts without an end",
    ),
    "some flags forgotten": (telling(ends_of_every), {"flags"}, "firsts without an end before: agent 4,"),
    "never truncates, but does": (
        other_spec(telling(lambda *_: {}), truncates="never"),
        {"flags"},
        '; write truncates="always" in its spec',
    ),
    "ends at reset": (
        telling(lambda self, step, actions: {"terminated": step.terminated | (self.clock == 0)}),
        {"flags"},
        "ends in reset()",
    ),
    "a trial where an episode begins": (
        telling(lambda self, step, actions: {"trial": step.first}),
        {"flags"},
        "trials where first is",
    ),
    "acting after the end": (
        telling(lambda self, step, actions: {"valid": ~none_of(step.valid)}),
        {"flags"},
        "valid rows after an end",
    ),
    "an end told twice": (telling(end_twice, absent=(4, 8)), {"dead"}, "ends after invalid rows"),
    "dead rows pay": (telling(pays_the_dead), {"dead"}, "rewards after invalid rows"),
    "a reward at reset": (telling(paid_at_reset), {"dead"}, "step 0; the row before is invalid"),
    "nobody begins": (telling(nobody_begins), {"dead"}, "invalid rows with first"),
    "what the dead do counts": (telling(hears_the_dead), {"dead"}, "depend on actions of invalid rows"),
    "last is the next first": (telling(last_is_next_first, "recall"), {"last"}, "the first of the next"),
    "last is the next first, of symbols": (
        telling(last_is_next_first, "n_back"),
        {"last"},
        "are the first of the next; last_obs is",
    ),
    "last is the one before": (
        telling(last_is_stale, "constant"),
        {"last"},
        "the one before the last action",
    ),
    "last is missing": (telling(lambda *_: {"last_obs": None}), {"last"}, "give last_obs"),
    "last of another shape": (
        telling(lambda self, step, actions: {"last_obs": step.last_obs[:, :2]}),
        {"last"},
        "last_obs is [24, 2, 3], must be [24, 4, 3]",
    ),
    "last of another kind": (
        telling(lambda self, step, actions: {"last_obs": step.last_obs.float()}),
        {"last"},
        "last_obs is torch.float32, must be torch.uint8",
    ),
    "last cannot be seen": (telling(last_is_elsewhere), {"last"}, "token 0 is [254, 77, 1]"),
    "a neighbour is felt": (
        telling(feels_a_neighbour, "recall"),
        {"isolate"},
        "rows that depend on actions of odd agents: agent 0, step 1, reward",
    ),
    "the first agent is felt by all": (telling(feels_the_first, "recall"), {"isolate"}, "depend on actions"),
    "the number of agents is felt": (
        lambda agents, seed: recall(agents, seed + agents),
        {"isolate"},
        "differ among 48 agents",
    ),
    "observations in one buffer": (telling(hidden_buffer("obs"), "recall"), {"still"}, "step 0, obs"),
    "rewards in one buffer": (telling(hidden_buffer("reward"), "constant"), {"still"}, "reward"),
    "actions are written to": (lambda a, s: Scribbles(recall(a, s)), {"still"}, "the actions of step"),
    "whole rewards": (
        telling(lambda self, step, actions: {"reward": step.reward.int()}),
        {"kind"},
        "a float",
    ),
    "flags as numbers": (
        telling(lambda self, step, actions: {"first": step.first.float()}),
        {"kind"},
        "step 0: first is torch.float32, must be torch.bool",
    ),
    "a column of rewards": (
        telling(lambda self, step, actions: {"reward": step.reward[:, None]}),
        {"kind"},
        "reward is [24, 1], must be a tensor [24]",
    ),
    "flags of NumPy": (
        telling(lambda self, step, actions: {"trial": step.trial.numpy()}),
        {"kind"},
        "trial is ndarray",
    ),
    "tokens as fractions": (
        telling(lambda self, step, actions: {"obs": step.obs.float()}),
        {"kind"},
        "obs is torch.float32, must be torch.uint8",
    ),
    "rewards that are no number": (
        telling(lambda self, step, actions: {"reward": step.reward / (self.clock % 50 != 49)}, "recall"),
        {"kind"},
        "that are not finite",
    ),
    "a token outside": (
        telling(token(0, 0xB3, 0, 1), "recall"),
        {"kind"},
        "agent 5, step 0; token 0 is [179",
    ),
    "a token of no feature": (
        telling(token(0, 254, 9, 1), "recall"),
        {"kind"},
        "a feature that is none of 0, 1",
    ),
    "a token behind padding": (telling(token(1, 254, 0, 1), "recall"), {"kind"}, "padding comes last"),
    "padding that is none": (telling(token(3, 255, 0, 0), "recall"), {"kind"}, "255 in all three bytes"),
    "observations out of their box": (made(Loud), {"kind"}, "must be finite, from -1 to 1"),
    "observations that are no number": (made(NotANumber), {"kind"}, "obs is nan"),
    "observations of another shape": (made(Wide), {"kind"}, "obs is [24, 4], must be [24, 2]"),
    "fewer agents than asked": (lambda a, s: recall(a - 1, s), {"kind"}, "requested 24, is 23"),
    "it raises": (
        lambda a, s: Raises(recall(a, s)),
        {"kind"},
        "step 37 raised ValueError: agent 3 fell off the table",
    ),
    "it says something else": (lambda a, s: Mute(recall(a, s)), {"kind"}, "the world returns tuple"),
    "the seed is ignored": (lambda a, s: recall(a, 7), {"repeat"}, "draw from the seed"),
    "another reset is another life": (lambda a, s: GoesOn(recall(a, s)), {"repeat"}, "after another reset()"),
    "no two worlds are the same": (
        lambda a, s: recall(a, s + next(BORN)),
        {"repeat", "isolate", "pure"},
        "in a new world",
    ),
    "torch's own generator": (
        lambda a, s: Shared(recall(a, s), lambda: float(torch.rand(()))),
        {"pure"},
        "draws from the global generator of torch;",
    ),
    "NumPy's own generator": (lambda a, s: Shared(recall(a, s), np.random.rand), {"pure"}, "numpy.random"),
    "Python's own generator": (
        lambda a, s: Shared(recall(a, s), random.random),
        {"pure"},
        "agent 0, step 1, reward",
    ),
    "a draw that nobody feels": (
        lambda a, s: Shared(recall(a, s), lambda: 0 * torch.rand(()).item()),
        {"pure"},
        "the global generator of torch;",
    ),
}
"""How to make a world, which laws it breaks, and what is said of it."""
