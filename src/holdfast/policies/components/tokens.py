"""What reads tokens, as components: the box, the token vectors, and attention over them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from holdfast.errors import ContractError
from holdfast.policies import attention, encoders
from holdfast.policies.components.component import Component, Shape, Size, require_axes, require_sources, tell
from holdfast.policies.token_front import TokenFront
from holdfast.shapes import Bool, Float, Tensor, UInt8
from holdfast.worlds.step import WorldSpec


class Vectors(NamedTuple):
    """Tokens as vectors, and which of them are there to be seen."""

    tokens: Float[Tensor, "N M D"]
    visible: Bool[Tensor, "N M"]


def _require_tokens(spec: WorldSpec) -> None:
    if not spec.features:
        raise ContractError(f"it reads tokens; the world shows {spec.sight}. Encoder reads anything")


class TokensToBox(Component):
    """Tokens drawn into a box `[features,rows,columns]`."""

    reads = "world"
    any_length = True

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read the world's tokens."""
        _require_tokens(spec)
        self.box = encoders.TokensToBox(spec.features, spec.window)
        return (self.box.channels, self.box.rows, self.box.columns)

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N C R K"]:
        """Draw each observation."""
        return self.box(obs)


class TokensToVectors(Component):
    """Tokens as vectors: which feature, where, and how much of it."""

    reads = "world"
    any_length = True

    def __init__(self, embedding: Size, frequencies: Size) -> None:
        super().__init__()
        self.embedding, self.frequencies = embedding, frequencies

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read the world's tokens."""
        _require_tokens(spec)
        self.front = TokenFront(spec.features, spec.window, self.embedding, self.frequencies)
        return (None, self.front.size)

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Vectors:
        """Turn each token into a vector."""
        return Vectors(*self.front(obs))


class LatentAttention(Component):
    """Learned queries that look at tokens; with `use_cls` the answer is the first query's alone."""

    def __init__(
        self,
        queries: Size,
        size: Size,
        heads: Size,
        layers: Size,
        out: Size | None = None,
        use_cls: bool = False,
    ) -> None:
        super().__init__()
        if size % heads:
            raise ContractError(f"size {size} cannot be shared by {heads} heads")
        self.sizes = {"queries": queries, "size": size, "heads": heads, "layers": layers}
        self.out, self.use_cls = out, use_cls

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read token vectors."""
        (shape,) = require_sources(sources, 1)
        if len(shape) != 2 or shape[0] is not None or shape[1] is None:
            raise ContractError(f"it reads token vectors [tokens, size]; its source gives {tell(shape)}")
        self.attention = attention.CrossAttention(shape[1], **self.sizes, out=self.out, use_cls=self.use_cls)
        size = self.out or self.sizes["size"]
        return (size,) if self.use_cls else (self.sizes["queries"], size)

    def begin(self, *nothing: Any) -> None:
        """Say zeros to an observation of nothing, if this is where encodings come out."""
        attention.quieten(self.attention, *nothing[0])

    def forward(self, seen: Vectors) -> Float[Tensor, "N *K out"]:
        """Gather from the tokens of each observation."""
        return self.attention(seen.tokens, seen.visible)


class SelfAttention(Component):
    """Vectors that look at each other, and one more of its own whose answer is the output."""

    def __init__(self, heads: Size, layers: Size, out: Size) -> None:
        super().__init__()
        self.heads, self.layers, self.out = heads, layers, out

    def build(self, sources: Sequence[Shape], spec: WorldSpec) -> Shape:
        """Read a fixed number of vectors."""
        _, size = require_axes(sources, "vectors", "size")
        if size % self.heads:
            raise ContractError(f"vectors of {size} cannot be shared by {self.heads} heads")
        self.attention = attention.SelfAttention(size, heads=self.heads, layers=self.layers, out=self.out)
        return (self.out,)

    def begin(self, *nothing: Any) -> None:
        """Say zeros to an observation of nothing."""
        attention.quieten(self.attention, *nothing)

    def forward(self, x: Float[Tensor, "N K D"]) -> Float[Tensor, "N out"]:
        """Say in one vector what the vectors of each row say."""
        return self.attention(x)
