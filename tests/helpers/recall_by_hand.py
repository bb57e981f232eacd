"""A policy whose weights are set by hand: it remembers the cue of `recall`, and names it."""

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.config.run import Config, override
from holdfast.memory.cell import Cell
from holdfast.play import Player
from holdfast.policies import PolicyOutput, RecurrentPolicy
from holdfast.worlds.builtin.symbols import Recall
from holdfast.worlds.tokens import PADDING

CUES = 4


class Latch(Cell):
    """Add the input to the state, which is the output."""

    bounded_state = staticmethod(lambda state: state["sum"])

    def __init__(self):
        super().__init__(CUES, CUES)
        self.weight = nn.Parameter(torch.zeros(1))

    def initial(self, batch):
        return TensorDict({"sum": torch.zeros(batch, 1, CUES)}, batch_size=[batch])

    def forward(self, x, state, clear, valid=None):
        before = torch.where(clear[:, None, None], 0.0, state["sum"])
        after = before + x[:, None]
        return after[:, 0], TensorDict({"sum": after}, batch_size=[len(x)])

    def reference_forward(self, x, state, clear, valid=None):
        raise AssertionError("this cell is never replayed")


class RecallByHand(RecurrentPolicy):
    """Name the remembered cue, or any of them with the same probability."""

    def __init__(self):
        super().__init__(CUES, CUES, 1, memory=Latch())

    def encode(self, obs):
        shown = obs[..., 1].long() - 1
        cue = torch.arange(CUES)
        return ((shown[..., None] == cue) & (obs[..., :1] != PADDING)).any(-2).float()

    def decode(self, features):
        return PolicyOutput(12 * features, features.sum(-1))


def recall_player():
    """A player that solves recall with its memory, and has 1 in 4 without."""
    policy = RecallByHand()
    policy.bind(Recall(1, cues=CUES).spec)
    return Player(policy, override(Config(), {"world": "recall"}))
