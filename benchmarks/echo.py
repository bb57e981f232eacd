"""Echo: the world of the end-to-end benchmark, which the JAX program has too: a bit is shown, and queried later."""

import torch

import holdfast
from holdfast import rng


class Echo:
    """Show a bit, and query it `wait` steps later; an observation has two numbers."""

    def __init__(self, agents, *, wait: int = 8, seed: int = 0, device="cpu"):
        self.agents, self.wait, self.seed = agents, wait, seed
        self.agent = torch.arange(agents, device=device)
        self.spec = holdfast.WorldSpec(obs_shape=(2,), action_names=("zero", "one"), best_return=1.0)

    def reset(self):
        """Start every agent's first episode."""
        self.clock = 0
        self.left = self.bit = torch.zeros_like(self.agent)
        none = torch.zeros_like(self.agent, dtype=torch.bool)
        return self.observe(torch.zeros(self.agents, device=self.agent.device), ended=none, starts=~none)

    def step(self, actions):
        """Answer, and go on."""
        query = self.left == 0
        reward = (query & (actions == self.bit)).float()
        self.clock, self.left = self.clock + 1, self.left - 1
        return self.observe(reward, ended=query, starts=query)

    def observe(self, reward, ended, starts):
        """Return the step after an answer."""
        bit = rng.randint(2, self.seed, rng.STREAM_WORLD, self.agent, self.clock)
        self.bit = torch.where(starts, bit, self.bit)
        self.left = torch.where(starts, self.wait, self.left)
        obs = torch.stack([torch.where(starts, 2 * self.bit - 1, 0), self.left == 0], dim=1).float()
        none = torch.zeros_like(starts)
        return holdfast.Step(obs, reward, ended, none, starts, ~none, none)
