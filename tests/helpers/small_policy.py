"""A small policy, and a world that only has a spec."""

from dataclasses import dataclass

import torch
from torch import nn

from holdfast.policies import PolicyOutput, RecurrentPolicy
from holdfast.worlds import WorldSpec

SPEC = WorldSpec(obs_shape=(5,), action_names=("a", "b", "c"))


@dataclass
class OnlySpec:
    """A world that cannot be stepped: the laws read its spec and bring their own script."""

    agents: int = 8
    spec: WorldSpec = SPEC

    def reset(self):
        raise AssertionError("never stepped")

    def step(self, actions):
        raise AssertionError("never stepped")


class Small(RecurrentPolicy):
    """Linear in, LSTM, linear out."""

    def __init__(self, spec=SPEC, hidden_size=16, num_layers=2, **memory):
        super().__init__(12, hidden_size, num_layers, **memory)
        self.inwards = nn.Linear(spec.obs_shape[0], 12)
        self.outwards = nn.Linear(hidden_size, len(spec.action_names) + 1)

    def encode(self, obs):
        return torch.tanh(self.inwards(obs.to(self.inwards.weight.dtype)))

    def decode(self, features):
        out = self.outwards(features)
        return PolicyOutput(out[:, :-1], out[:, -1])


def make_small(kind=Small, seed=0, **options):
    torch.manual_seed(seed)
    return kind(**options)
