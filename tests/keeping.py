"""A memory that is one number, the last one seen, so that everybody can be asked whose it has."""

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.memory.cell import Cell
from holdfast.policies import RecurrentPolicy, Thoughts

NOTHING = -1.0
"""What is remembered at first."""


class Keeps(Cell):
    """Says what it remembered before it read, and remembers what it reads."""

    def __init__(self):
        super().__init__(1, 1)
        self.weight = nn.Parameter(torch.zeros(1))

    def initial(self, batch):
        return TensorDict({"last": torch.full((batch, 1), NOTHING)}, batch_size=[batch])

    def forward(self, x, state, clear, valid=None):
        held = torch.where(clear[:, None], NOTHING, state["last"])
        after = x if valid is None else torch.where(valid[:, None], x, state["last"])
        return held, TensorDict({"last": after}, batch_size=[len(x)])

    def plain(self, x, state, clear, valid=None):
        raise AssertionError("only lived, never replayed")


class Keeper(RecurrentPolicy):
    """Notes what it remembered at every step; it always takes one action."""

    def __init__(self, action=0, noted=None):
        super().__init__(1, 1, 1, memory=Keeps())
        self.action, self.noted = action, Notes() if noted is None else noted

    def encode(self, obs):
        return obs

    def decode(self, features):
        self.noted.append(features[:, 0].tolist())
        scores = torch.zeros(len(features), 3)
        scores[:, self.action] = 1.0
        return Thoughts(scores, scores[:, 0])


class Notes(list):
    """A list that stays the same one when its policy is copied."""

    def __deepcopy__(self, memo):
        return self
