"""`latent_attn_tiny`, `_small` and `_med`: policies that look at tokens by attention."""

from typing import Any, ClassVar

from holdfast.policies.attention import AttentionEncoder, AttentionSizes
from holdfast.policies.heads import BilinearActor, Critic
from holdfast.policies.spaces import require_tokens
from holdfast.policies.template import RecurrentPolicy, Thoughts
from holdfast.shapes import Float, Tensor, UInt8
from holdfast.worlds.step import WorldSpec


class _LatentAttn(RecurrentPolicy):
    """Tokens -> attention -> memory -> actor and critic."""

    any_length = True

    sizes: ClassVar[AttentionSizes]

    def __init__(self, spec: WorldSpec, hidden_size: int = 128, num_layers: int = 2, **memory: Any) -> None:
        require_tokens(type(self).__name__, spec)
        super().__init__(128, hidden_size, num_layers, **memory)
        self.encoder = AttentionEncoder(spec.features, spec.window, self.sizes, out=128)
        self.critic = Critic(hidden_size)
        self.actor = BilinearActor(hidden_size, spec.action_names)

    def encode(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode tokens."""
        return self.encoder(obs)

    def decode(self, features: Float[Tensor, "N H"]) -> Thoughts:
        """Score actions and judge."""
        return Thoughts(self.actor(features), self.critic(features))


class LatentAttnTiny(_LatentAttn):
    """One query looks twice: the fastest, and the least expressive."""

    sizes = AttentionSizes(embedding=10, frequencies=4, queries=1, heads=4, cross_layers=2, self_layers=0)


class LatentAttnSmall(_LatentAttn):
    """Ten queries look once, then twice at each other."""

    sizes = AttentionSizes(embedding=8, frequencies=8, queries=10, heads=4, cross_layers=1, self_layers=2)


class LatentAttnMed(_LatentAttn):
    """Ten queries look three times, then three times at each other."""

    sizes = AttentionSizes(embedding=12, frequencies=8, queries=10, heads=8, cross_layers=3, self_layers=3)
