"""Parallel environments small enough to be lived in tests; every number tells whose it is and when."""

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

from holdfast.worlds import draws

TERMINATED, TRUNCATED, BOTH = (True, False), (False, True), (True, True)
NAMES = ("ann", "bob", "cy")
ALL_TO_3 = {name: [(0, 3, TRUNCATED)] for name in NAMES}


class Visits(ParallelEnv):
    """People come and go by a script of episodes, each `{name: [(from, to, how it ends), ...]}`.

    Shows 1000 * place + how often it was shown before, and the action that led there, and 100 times what the
    seed of the episode drew; in one buffer each that the next call overwrites.
    """

    possible_agents = NAMES

    def __init__(self, script=(ALL_TO_3,), takes=None):
        self.script, self.takes = script, spaces.Discrete(3) if takes is None else takes
        self.sees = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.buffers = {name: np.zeros(3, np.float32) for name in self.possible_agents}
        self.episode, self.closed, self.taken = -1, False, []

    def observation_space(self, agent):
        return self.sees

    def action_space(self, agent):
        return self.takes

    def reset(self, seed=None, options=None):
        self.np_random = np.random.default_rng(seed)
        self.luck = int(self.np_random.integers(1000))
        # Which episode of the script: a life that is lived again must find it.
        self.episode = self.luck % len(self.script)
        self.age, self.shown = 0, dict.fromkeys(self.possible_agents, 0)
        self.agents = [name for name in self.possible_agents if self.is_there(name)]
        return {name: self.show(name, -1) for name in self.agents}, {name: {} for name in self.agents}

    def is_there(self, name):
        return any(begin <= self.age < end for begin, end, _ in self.script[self.episode].get(name, []))

    def show(self, name, action):
        first = action if np.isscalar(action) else np.asarray(action).flat[0]
        self.buffers[name][:] = 1000 * NAMES.index(name) + self.shown[name], first, 100 * self.luck
        self.shown[name] += 1
        return self.buffers[name]

    def ends_of(self, name):
        for _, end, how in self.script[self.episode][name]:
            if end == self.age:
                return how
        return False, False

    def step(self, actions):
        assert set(actions) == set(self.agents), "actions of others, or not of all"
        self.taken.append(actions)
        before, self.age = list(self.agents), self.age + 1
        # In place: who keeps this list must have copied it.
        self.agents[:] = [name for name in self.possible_agents if self.is_there(name)]
        told = [*before, *(name for name in self.agents if name not in before)]
        obs = {name: self.show(name, actions.get(name, -1)) for name in told}
        reward = {name: 10.0 * NAMES.index(name) + self.age for name in before}
        terminated, truncated = ({name: self.ends_of(name)[which] for name in before} for which in range(2))
        return obs, reward, terminated, truncated, {name: {} for name in told}

    def close(self):
        self.closed = True


class OneByOne(AECEnv):
    """Lets one act after the other."""

    possible_agents = NAMES


def seed_of(seed, env, episode):
    return int(draws.below(1 << 31, seed, draws.STREAM_WORLD, torch.tensor(env), episode))


def lived_alone(env, number, seed, actions, steps):
    """What one environment does, by hand: of everybody in it, the steps in which it is there.

    `actions` is `[step][place]`.
    """
    told, episode = {name: [] for name in env.possible_agents}, 0
    obs, _ = env.reset(seed=seed_of(seed, number, episode))
    obs = {name: each.copy() for name, each in obs.items()}
    first = set(env.agents)
    for step in range(steps):
        there = list(env.agents)
        taken = {name: np.int64(actions[step][env.possible_agents.index(name)]) for name in there}
        after, reward, terminated, truncated, _ = env.step(taken)
        for name in there:
            ended = terminated[name] or truncated[name]
            last = after[name].tolist() if ended else None
            row = obs[name].tolist(), name in first, int(taken[name]), reward[name]
            told[name].append((*row, terminated[name], truncated[name], last))
        first = set(env.agents) - set(there)
        if not env.agents:
            episode += 1
            after, _ = env.reset(seed=seed_of(seed, number, episode))
            first = set(env.agents)
        obs = {name: after[name].copy() for name in env.agents}
    return told


class Guests(Visits):
    """Ann stays two steps, Bob five; Cy comes late and twice."""

    def __init__(self):
        came = {"ann": [(0, 2, TERMINATED)], "bob": [(0, 5, TRUNCATED)]}
        super().__init__(({**came, "cy": [(1, 3, TRUNCATED), (4, 5, TERMINATED)]},))

    def show(self, name, action):
        return super().show(name, action) / 1000
