"""Gymnasium environments small enough to be lived in tests; every number tells whose it is and when."""

from itertools import count

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from holdfast.worlds import draws

MODES = ("same_step", "next_step", "disabled")
TERMINATED, TRUNCATED, BOTH = (True, False), (False, True), (True, True)


class Counting(gymnasium.Env):
    """Plays a script of episodes, each a length and how it ends, over and over.

    Shows 1000 * agent + how many observations it showed before, and the action that led there. Everything
    is shown in one buffer that the next call overwrites.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, agent=0, script=((3, TERMINATED),)):
        self.agent, self.script = agent, script
        self.buffer = np.zeros(2, np.float32)
        self.closed = False

    def show(self, action):
        self.buffer[:] = 1000 * self.agent + self.shown, action
        self.shown += 1
        return self.buffer

    def reset(self, *, seed=None, options=None):
        assert options is None
        super().reset(seed=seed)
        if seed is not None:
            self.episode, self.shown = -1, 0
        self.episode += 1
        self.age = 0
        return self.show(-1), {"odd": "x" if self.agent else 3}

    def step(self, action):
        self.age += 1
        length, flags = self.script[self.episode % len(self.script)]
        assert self.age <= length, "stepped after its end"
        ended = flags if self.age == length else (False, False)
        return self.show(action), 1000 * self.agent + self.shown + action / 8, *ended, {}

    def close(self):
        self.closed = True


def counting(*scripts):
    """A function that makes the environments of agents 0, 1 and so on, each with its script."""
    agents = count()

    def make():
        agent = next(agents)
        return Counting(agent, scripts[agent % len(scripts)])

    return make


class Shows(gymnasium.Env):
    """Shows samples of any space, takes any actions and keeps them; every third step truncates."""

    def __init__(self, shows, takes=None):
        self.observation_space, self.action_space = shows, spaces.Discrete(2) if takes is None else takes
        self.taken = []

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.age = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.taken.append(action)
        self.age += 1
        return self.observation_space.sample(), 1.0, False, self.age == 3, {}


def seed_of(seed, agent):
    return int(draws.below(1 << 31, seed, draws.STREAM_WORLD, torch.tensor(agent), 0))


def lived_alone(env, seed, actions):
    """What one environment does with a list of actions, told step by step, by hand."""
    told, (obs, _) = [], env.reset(seed=seed)
    first = True
    for action in actions:
        before = np.array(obs).tolist()
        obs, reward, terminated, truncated, _ = env.step(np.int64(action))
        ended = terminated or truncated
        last = np.array(obs).tolist() if ended else None
        told.append((before, first, int(action), float(np.float32(reward)), terminated, truncated, last))
        first = ended
        if ended:
            obs, _ = env.reset()
    return told


def lived_in(world, calls, actions):
    """The same of every agent of a world: its valid steps. `actions` is `[agent][step that counts]`."""
    step, agents = world.reset(), world.agents
    told = [[] for _ in range(agents)]
    for _ in range(calls):
        taken = [
            actions[agent][len(told[agent])] if step.valid[agent] else (agent + len(told[agent])) % 2
            for agent in range(agents)
        ]
        before, step = step, world.step(torch.tensor(taken))
        for agent in range(agents):
            if before.valid[agent]:
                told[agent].append(_transition(before, taken[agent], step, agent))
    return told


def _transition(before, action, after, agent):
    terminated, truncated = bool(after.terminated[agent]), bool(after.truncated[agent])
    return (
        before.obs[agent].tolist(),
        bool(before.first[agent]),
        action,
        float(after.reward[agent]),
        terminated,
        truncated,
        after.last_obs[agent].tolist() if terminated or truncated else None,
    )
