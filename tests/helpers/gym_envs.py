"""Small Gymnasium environments whose numbers identify the agent and the step."""

from itertools import count

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from holdfast import rng

MODES = ("same_step", "next_step", "disabled")
TERMINATED, TRUNCATED, BOTH = (True, False), (False, True), (True, True)


class Counting(gymnasium.Env):
    """Repeats a script of episodes, each a length and its end flags.

    The observation is 1000 * agent + the number of observations before, and the last action. It is returned
    in one buffer that the next call overwrites.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, agent=0, script=((3, TERMINATED),)):
        self.agent, self.script = agent, script
        self.buffer = np.zeros(2, np.float32)
        self.closed = False

    def show(self, action):
        self.buffer[:] = 1000 * self.agent + self.count, action
        self.count += 1
        return self.buffer

    def reset(self, *, seed=None, options=None):
        assert options is None
        super().reset(seed=seed)
        if seed is not None:
            self.episode, self.count = -1, 0
        self.episode += 1
        self.age = 0
        return self.show(-1), {"odd": "x" if self.agent else 3}

    def step(self, action):
        self.age += 1
        length, flags = self.script[self.episode % len(self.script)]
        assert self.age <= length, "stepped after its end"
        ended = flags if self.age == length else (False, False)
        return self.show(action), 1000 * self.agent + self.count + action / 8, *ended, {}

    def close(self):
        self.closed = True


def counting(*scripts):
    """Return a function that makes the environments of agents 0, 1, ..., each with its script."""
    agents = count()

    def make():
        agent = next(agents)
        return Counting(agent, scripts[agent % len(scripts)])

    return make


class Sampling(gymnasium.Env):
    """Returns samples of any space and records its actions; every third step truncates."""

    def __init__(self, observation_space, action_space=None):
        self.observation_space = observation_space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.actions_taken = []

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.observation_space.seed(seed)
        self.age = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.actions_taken.append(action)
        self.age += 1
        return self.observation_space.sample(), 1.0, False, self.age == 3, {}


def seed_of(seed, agent):
    return int(rng.randint(1 << 31, seed, rng.STREAM_WORLD, torch.tensor(agent), 0))


def env_transitions(env, seed, actions):
    """Return the transitions of one environment, stepped directly."""
    rows, (obs, _) = [], env.reset(seed=seed)
    first = True
    for action in actions:
        before = np.array(obs).tolist()
        obs, reward, terminated, truncated, _ = env.step(np.int64(action))
        ended = terminated or truncated
        last = np.array(obs).tolist() if ended else None
        rows.append((before, first, int(action), float(np.float32(reward)), terminated, truncated, last))
        first = ended
        if ended:
            obs, _ = env.reset()
    return rows


def world_transitions(world, calls, actions):
    """Return the transitions of every agent, valid steps only; `actions` is `[agent][valid step]`."""
    step, agents = world.reset(), world.agents
    rows = [[] for _ in range(agents)]
    for _ in range(calls):
        actions_taken = [
            actions[agent][len(rows[agent])] if step.valid[agent] else (agent + len(rows[agent])) % 2
            for agent in range(agents)
        ]
        before, step = step, world.step(torch.tensor(actions_taken))
        for agent in range(agents):
            if before.valid[agent]:
                rows[agent].append(_transition(before, actions_taken[agent], step, agent))
    return rows


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
