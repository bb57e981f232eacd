"""`fast`: a small policy for any space, over a token box where there are tokens; the default."""

from typing import Any

from holdfast.policies.actions import actions_of
from holdfast.policies.heads import Critic
from holdfast.policies.spaces import make_actor, make_encoder
from holdfast.policies.template import RecurrentPolicy, Thoughts
from holdfast.shapes import Float, Tensor
from holdfast.worlds.seen import Seen
from holdfast.worlds.step import WorldSpec


class Fast(RecurrentPolicy):
    """Tokens -> box -> two convolutions -> LSTM -> actor and critic.

    Other observations have an encoder by their space, other actions an actor by theirs.
    """

    any_length = True

    def __init__(self, spec: WorldSpec, hidden_size: int = 128, num_layers: int = 2, **memory: Any) -> None:
        super().__init__(128, hidden_size, num_layers, **memory)
        self.actions = actions_of(spec)
        self.encoder = make_encoder(spec, size=128)
        self.critic = Critic(hidden_size)
        self.actor = make_actor(spec, hidden_size)

    def encode(self, obs: Seen) -> Float[Tensor, "N D"]:
        """Encode what is seen."""
        return self.encoder(obs)

    def decode(self, features: Float[Tensor, "N H"]) -> Thoughts:
        """Score actions and judge."""
        return Thoughts(self.actor(features), self.critic(features))
