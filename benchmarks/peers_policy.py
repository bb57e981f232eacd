"""The policy of peers_cpu.py: Linear 64, LSTM 128, linear heads."""

from typing import Any

import torch
from torch import nn

from holdfast.policies import PolicyOutput, RecurrentPolicy, distribution_for
from holdfast.types import Float, Tensor
from holdfast.worlds.step import WorldSpec


class Small(RecurrentPolicy):
    """100,035 weights on CartPole."""

    def __init__(self, spec: WorldSpec, hidden_size: int = 128, num_layers: int = 1, **memory: Any) -> None:
        super().__init__(64, hidden_size, num_layers, **memory)
        self.actions = distribution_for(spec)
        self.encoder = nn.Linear(spec.obs_shape[0], 64)
        self.actor = nn.Linear(hidden_size, len(spec.action_names))
        self.critic = nn.Linear(hidden_size, 1)

    def encode(self, obs: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """Encode observations."""
        return torch.relu(self.encoder(obs))

    def decode(self, features: Float[Tensor, "N H"]) -> PolicyOutput:
        """Return logits and values."""
        return PolicyOutput(self.actor(features), self.critic(features).squeeze(-1))
