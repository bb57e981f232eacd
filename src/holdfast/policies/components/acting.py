"""Heads as components: embeddings of actions, and the scores made with them."""

from collections.abc import Sequence

from holdfast.errors import ContractError
from holdfast.policies import heads
from holdfast.policies.components.component import Component, Shape, Size, require_axes, require_sources
from holdfast.shapes import Float, Tensor
from holdfast.worlds.step import WorldSpec


class ActionEmbeddings(Component):
    """A learned vector for each action, the same for all rows; actions are known by name."""

    reads = "nothing"

    def __init__(self, size: Size = heads.EMBEDDING_SIZE, room: Size = heads.MAX_ACTIONS) -> None:
        super().__init__()
        self.size, self.room = size, room

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Give each of the world's actions a vector."""
        require_sources(sources, 0)
        if spec.action is not None:
            raise ContractError(f"it knows actions by name; the world takes {spec.action}: use Actor")
        self.embeddings = heads.ActionEmbeddings(spec.action_names, self.room, self.size)
        return (len(spec.action_names), self.size)

    def forward(self) -> Float[Tensor, "actions D"]:
        """Give the vectors of all actions."""
        return self.embeddings()


class Bilinear(Component):
    """Scores of actions by how well a row fits their embeddings; sources: the row, then the embeddings."""

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a vector and the embeddings."""
        row, embeddings = require_sources(sources, 2)
        (size,) = require_axes([row], "size")
        if len(embeddings) != 2 or embeddings[0] != len(spec.action_names) or embeddings[1] is None:
            raise ContractError("its second source must be the embeddings of the actions")
        self.scores = heads.Bilinear(size, embeddings[1])
        return (len(spec.action_names),)

    def forward(
        self, x: Float[Tensor, "N H"], embeddings: Float[Tensor, "actions D"]
    ) -> Float[Tensor, "N actions"]:
        """Score every action for each row."""
        return self.scores(x, embeddings)
