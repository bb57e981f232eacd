"""`fast`: a small convolutional policy over a token box; the default."""

from typing import Any

from holdfast.policies.encoders import BoxEncoder
from holdfast.policies.heads import BilinearActor, Critic
from holdfast.policies.template import RecurrentPolicy, Thoughts
from holdfast.shapes import Float, Tensor, UInt8
from holdfast.worlds.step import WorldSpec


class Fast(RecurrentPolicy):
    """Tokens -> box -> two convolutions -> LSTM -> actor and critic."""

    any_length = True

    def __init__(self, spec: WorldSpec, hidden_size: int = 128, num_layers: int = 2, **memory: Any) -> None:
        super().__init__(128, hidden_size, num_layers, **memory)
        self.encoder = BoxEncoder(spec.features, spec.window, size=128)
        self.critic = Critic(hidden_size)
        self.actor = BilinearActor(hidden_size, spec.action_names)

    def encode(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode tokens."""
        return self.encoder(obs)

    def decode(self, features: Float[Tensor, "N H"]) -> Thoughts:
        """Score actions and judge."""
        return Thoughts(self.actor(features), self.critic(features))
