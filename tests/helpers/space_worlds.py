"""Small worlds with other spaces than tokens and named actions."""

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast import rng
from holdfast.worlds import Step, WorldSpec
from holdfast.worlds.obs import check_actions

TREE = spaces.Dict(
    {
        "picture": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "vector": spaces.Box(-np.inf, np.inf, (3,), np.float32),
        "more": spaces.Tuple(
            (spaces.Discrete(4, start=-1), spaces.MultiBinary(3), spaces.MultiDiscrete([2, 3], start=[5, 0]))
        ),
    }
)
TREE_SPEC = WorldSpec((), (), observation=TREE, action=spaces.Box(-1, 1, (2,)))
"""A Dict of all observation spaces, and two continuous actions."""
IMAGE_SPEC = WorldSpec(
    (3, 12, 9),
    (),
    observation=spaces.Box(0, 255, (3, 12, 9), np.uint8),
    action=spaces.MultiDiscrete([3, 2, 4]),
)
"""An image, channels first, and three choices."""


class Memorize:
    """A value is shown in an episode's first observation, and must be named `delay` steps later.

    A subclass defines observation and reward from `number`, uniform in [0,1). The reward is paid at the
    query, where the episode ends.
    """

    spec: WorldSpec

    def __init__(self, agents, delay=2, seed=0):
        self.agents, self.delay, self.seed = agents, delay, seed
        self.agent = torch.arange(agents)

    def reset(self):
        self.clock = 0
        return self.tell(torch.zeros(self.agents))

    def step(self, actions):
        check_actions(actions, self.agents, self.spec.action)
        at_query = self.clock % (self.delay + 1) == self.delay
        reward = self.pay(actions) if at_query else torch.zeros(self.agents)
        self.clock += 1
        return self.tell(reward)

    def tell(self, reward):
        age = self.clock % (self.delay + 1)
        if age == 0:
            self.number = rng.uniform(self.seed, rng.STREAM_WORLD, self.agent, self.clock)
        all_agents = torch.ones(self.agents, dtype=torch.bool)
        return Step(
            obs=self.show(age == 0, age == self.delay),
            reward=reward,
            terminated=all_agents & (age == 0 and self.clock > 0),
            truncated=~all_agents,
            first=all_agents & (age == 0),
            valid=all_agents,
            trial=~all_agents,
        )


class SayNumber(Memorize):
    """A number from -1 to 1 is shown; the reward is 1 - |a - number|, with a clipped to the box.

    The best return is 1; without memory it is 0.5, by action 0.
    """

    spec = WorldSpec((2,), (), observation=spaces.Box(-1, 1, (2,)), action=spaces.Box(-1, 1, (1,)))

    @property
    def target(self):
        return 2 * self.number - 1

    def show(self, first, at_query):
        return torch.stack([self.target * first, torch.full((self.agents,), float(at_query))], dim=-1)

    def pay(self, actions):
        return 1 - (actions[:, 0].clamp(-1, 1) - self.target).abs()


class SayNumberInATree(SayNumber):
    """The same, shown as a Dict."""

    spec = WorldSpec(
        (),
        (),
        observation=spaces.Dict({"number": spaces.Box(-1, 1, (1,)), "asked": spaces.Discrete(2)}),
        action=spaces.Box(-1, 1, (1,)),
    )

    def show(self, first, at_query):
        number = (self.target * first)[:, None]
        query = torch.full((self.agents,), int(at_query))
        return TensorDict({"number": number, "asked": query}, batch_size=[self.agents])


class NamePlace(Memorize):
    """One pixel of an 8x8 image is bright: its row's third and its column's half must be named."""

    spec = WorldSpec(
        (8, 8, 1),
        (),
        observation=spaces.Box(0, 255, (8, 8, 1), np.uint8),
        action=spaces.MultiDiscrete([3, 2]),
    )

    @property
    def place(self):
        which = (self.number * 6).long()
        return torch.stack([which // 2, which % 2], dim=-1)

    def show(self, first, at_query):
        image = torch.zeros(self.agents, 8, 8, 1, dtype=torch.uint8)
        rows, columns = (self.place * torch.tensor([3, 4])).unbind(-1)
        image[self.agent, rows, columns, 0] = 255 * int(first)
        return image

    def pay(self, actions):
        return (actions == self.place).float().mean(-1)
