"""Small parallel environments whose numbers identify the agent and the step."""

import numpy as np
import torch
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

from holdfast import rng

TERMINATED, TRUNCATED, BOTH = (True, False), (False, True), (True, True)
NAMES = ("ann", "bob", "cy")
ALL_TO_3 = {name: [(0, 3, TRUNCATED)] for name in NAMES}


class Visits(ParallelEnv):
    """Agents join and leave by a script of episodes, each `{name: [(start, end, end flags), ...]}`.

    The observation is 1000 * index + the number of observations before, the last action, and 100 times a
    number drawn from the episode's seed; in one buffer per agent that the next call overwrites.
    """

    possible_agents = NAMES

    def __init__(self, script=(ALL_TO_3,), act_space=None):
        self.script, self.act_space = script, spaces.Discrete(3) if act_space is None else act_space
        self.obs_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        self.buffers = {name: np.zeros(3, np.float32) for name in self.possible_agents}
        self.episode, self.closed, self.actions_taken = -1, False, []

    def observation_space(self, agent):
        return self.obs_space

    def action_space(self, agent):
        return self.act_space

    def reset(self, seed=None, options=None):
        self.np_random = np.random.default_rng(seed)
        self.luck = int(self.np_random.integers(1000))
        # Drawn, so that a replay needs the seed to find the episode.
        self.episode = self.luck % len(self.script)
        self.age, self.counts = 0, dict.fromkeys(self.possible_agents, 0)
        self.agents = [name for name in self.possible_agents if self.is_present(name)]
        return {name: self.show(name, -1) for name in self.agents}, {name: {} for name in self.agents}

    def is_present(self, name):
        return any(begin <= self.age < end for begin, end, _ in self.script[self.episode].get(name, []))

    def show(self, name, action):
        first = action if np.isscalar(action) else np.asarray(action).flat[0]
        self.buffers[name][:] = 1000 * NAMES.index(name) + self.counts[name], first, 100 * self.luck
        self.counts[name] += 1
        return self.buffers[name]

    def end_flags(self, name):
        for _, end, how in self.script[self.episode][name]:
            if end == self.age:
                return how
        return False, False

    def step(self, actions):
        assert set(actions) == set(self.agents), "actions must be those of all present agents"
        self.actions_taken.append(actions)
        before, self.age = list(self.agents), self.age + 1
        # In place: callers must copy the list.
        self.agents[:] = [name for name in self.possible_agents if self.is_present(name)]
        observers = [*before, *(name for name in self.agents if name not in before)]
        obs = {name: self.show(name, actions.get(name, -1)) for name in observers}
        reward = {name: 10.0 * NAMES.index(name) + self.age for name in before}
        terminated, truncated = ({name: self.end_flags(name)[which] for name in before} for which in range(2))
        return obs, reward, terminated, truncated, {name: {} for name in observers}

    def close(self):
        self.closed = True


class OneByOne(AECEnv):
    """Agents act in turns."""

    possible_agents = NAMES


def seed_of(seed, env, episode):
    return int(rng.randint(1 << 31, seed, rng.STREAM_WORLD, torch.tensor(env), episode))


def env_transitions(env, number, seed, actions, steps):
    """Return the transitions of every agent of an env stepped directly; `actions` is `[step][index]`."""
    rows, episode = {name: [] for name in env.possible_agents}, 0
    obs, _ = env.reset(seed=seed_of(seed, number, episode))
    obs = {name: value.copy() for name, value in obs.items()}
    first = set(env.agents)
    for step in range(steps):
        present = list(env.agents)
        actions_of = {name: np.int64(actions[step][env.possible_agents.index(name)]) for name in present}
        after, reward, terminated, truncated, _ = env.step(actions_of)
        for name in present:
            ended = terminated[name] or truncated[name]
            last = after[name].tolist() if ended else None
            start = obs[name].tolist(), name in first, int(actions_of[name]), reward[name]
            rows[name].append((*start, terminated[name], truncated[name], last))
        first = set(env.agents) - set(present)
        if not env.agents:
            episode += 1
            after, _ = env.reset(seed=seed_of(seed, number, episode))
            first = set(env.agents)
        obs = {name: after[name].copy() for name in env.agents}
    return rows


class Guests(Visits):
    """Ann stays two steps, Bob five; Cy joins late and twice."""

    def __init__(self):
        stays = {"ann": [(0, 2, TERMINATED)], "bob": [(0, 5, TRUNCATED)]}
        super().__init__(({**stays, "cy": [(1, 3, TRUNCATED), (4, 5, TERMINATED)]},))

    def show(self, name, action):
        return super().show(name, action) / 1000
