"""`fast`: the default policy, small, for any observation and action space."""

from typing import Any

from holdfast.policies.distributions import distribution_for
from holdfast.policies.heads import Critic
from holdfast.policies.recurrent_policy import PolicyOutput, RecurrentPolicy
from holdfast.policies.spaces import make_actor, make_encoder
from holdfast.types import Float, Tensor
from holdfast.worlds.obs import Obs
from holdfast.worlds.step import WorldSpec

TOKEN_WIDTHS = (128, 512, 1024)
"""Units of the encoder, the actor and the critic for tokens."""
WIDTHS = (64, 64, 64)
"""The same for other observations: they learn as well as wider layers, in half the time."""


class Fast(RecurrentPolicy):
    """Encoder -> LSTM -> actor and critic. Tokens are encoded by two convolutions over a box."""

    accepts_trimmed_obs = True

    def __init__(self, spec: WorldSpec, hidden_size: int = 128, num_layers: int = 2, **memory: Any) -> None:
        size, actor_width, critic_width = TOKEN_WIDTHS if spec.features else WIDTHS
        super().__init__(size, hidden_size, num_layers, **memory)
        self.actions = distribution_for(spec)
        self.encoder = make_encoder(spec, size)
        self.critic = Critic(hidden_size, critic_width)
        self.actor = make_actor(spec, hidden_size, actor_width)

    def encode(self, obs: Obs) -> Float[Tensor, "N D"]:
        """Encode observations."""
        return self.encoder(obs)

    def decode(self, features: Float[Tensor, "N H"]) -> PolicyOutput:
        """Return logits and values."""
        return PolicyOutput(self.actor(features), self.critic(features))
