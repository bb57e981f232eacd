"""Components that fit any world: an encoder by what it shows, an actor by what it takes."""

from collections.abc import Sequence

from holdfast.policies.actions import actions_of
from holdfast.policies.components.component import Component, Shape, Size, require_axes
from holdfast.policies.spaces import make_actor, make_encoder
from holdfast.shapes import Float, Tensor
from holdfast.worlds.seen import Seen
from holdfast.worlds.step import WorldSpec


class Encoder(Component):
    """A vector from whatever is seen: tokens, numbers, pictures, choices, or a tree of these."""

    reads = "world"
    any_length = True

    def __init__(self, size: Size = 128) -> None:
        super().__init__()
        self.size = size

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read the world."""
        self.encoder = make_encoder(spec, self.size)
        return (self.size,)

    def forward(self, obs: Seen) -> Float[Tensor, "N D"]:
        """Encode each observation."""
        return self.encoder(obs)


class Actor(Component):
    """The scores that the world's actions are made of, be they named, several, or numbers."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a vector."""
        (size,) = require_axes(sources, "size")
        self.actor = make_actor(spec, size)
        return (actions_of(spec).size,)

    def forward(self, x: Float[Tensor, "N H"]) -> Float[Tensor, "N scores"]:
        """Score each row."""
        return self.actor(x)
