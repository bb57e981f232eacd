"""`latent_attn_tiny`, `_small` and `_med`: policies with attention over tokens; token embeddings and attention."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from holdfast.errors import ContractError
from holdfast.policies.binding import NamedModule
from holdfast.policies.encoders import orthogonal
from holdfast.policies.heads import BilinearActor, Critic
from holdfast.policies.recurrent_policy import PolicyOutput, RecurrentPolicy
from holdfast.policies.spaces import require_tokens
from holdfast.torch_versions import is_exporting
from holdfast.types import Bool, Float, Tensor, UInt8
from holdfast.worlds.step import Feature, WorldSpec
from holdfast.worlds.tokens import GLOBAL, PADDING, empty, shorten

EMBEDDING_STD, ORIGINAL_STD = 1.0, 0.02
"""Of feature embeddings: as large as the Fourier codes beside them; at 0.02 features are hard to tell apart."""
EncoderInit = Literal["standard", "original"]
"""`original`: small feature embeddings, and encodings as large as the last norm makes them."""


def strip_padding(obs: UInt8[Tensor, "N M 3"]) -> UInt8[Tensor, "N M2 3"]:
    """Drop the padding that all rows end in, on the CPU only.

    On a GPU this would synchronize host and device at every call; there the collector drops it once a
    rollout, and the mask does the rest. An exported program has no data-dependent shapes.
    """
    return shorten(obs) if obs.device.type == "cpu" and not is_exporting() else obs


def position_codes(window: tuple[int, int], frequencies: int) -> Float[Tensor, "256 codes"]:
    """Return the Fourier code of every location byte: cosines and sines of row and column.

    Coordinates 0..10 become -1..1; a global token is at the centre of the window. At frequency 1 no two
    places share both cosine and sine, since even 14 becomes no more than 1.8.
    """
    location = torch.arange(256)
    row, column = location >> 4, location & 0x0F
    row[GLOBAL], column[GLOBAL] = window[0] // 2, window[1] // 2
    angles = [(axis / 5.0 - 1.0)[:, None] * 2.0 ** torch.arange(frequencies) for axis in (row, column)]
    return torch.cat([wave(angle) for angle in angles for wave in (torch.cos, torch.sin)], -1)


class TokenEmbedding(NamedModule):
    """Embed each token: feature embedding, position code, normalized value.

    The mask is false for padding, unknown features and places outside the window: attention must ignore those vectors.
    """

    named_kind = "features"

    def __init__(
        self,
        features: Sequence[Feature],
        window: tuple[int, int],
        embedding: int,
        frequencies: int,
        std: float = EMBEDDING_STD,
    ) -> None:
        super().__init__()
        self.require_room(features, ())
        self.size = embedding + 4 * frequencies + 1
        self.embedding = nn.Embedding(256, embedding, padding_idx=PADDING)
        nn.init.trunc_normal_(self.embedding.weight, std=std)
        with torch.no_grad():
            self.embedding.weight[PADDING] = 0.0
        rows, columns = window
        location = torch.arange(256)
        inside = (location == GLOBAL) | ((location >> 4 < rows) & (location & 0x0F < columns))
        # Not saved: normalizations come with the features of the world the policy is bound to.
        self.register_buffer("normalization", torch.ones(256), persistent=False)
        self.register_buffer("inside", inside, persistent=False)
        self.register_buffer("codes", position_codes(window, frequencies), persistent=False)
        self.normalization: Tensor
        self.inside: Tensor
        self.codes: Tensor
        self.set_names(features, ())

    def require_room(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Reject more features than there are ids."""
        if len(features) > PADDING:
            raise ContractError(f"The world has {len(features)} features; ids name at most {PADDING}.")

    def set_names(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Set normalizations; added features use an embedding that exists already, untrained."""
        self.num_features = len(features)
        sizes = self.normalization.new_tensor([feature.normalization for feature in features])
        self.normalization[: self.num_features] = sizes

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> tuple[Float[Tensor, "N M2 D"], Bool[Tensor, "N M2"]]:
        """Return the vectors of `[N,M,3]` tokens, and the mask of visible ones."""
        obs = strip_padding(obs)
        location, feature = obs[..., 0].int(), obs[..., 1].int()
        # Look up tables over the 256 bytes instead of computing for each token.
        value = obs[..., 2].to(self.normalization.dtype) / self.normalization[feature]
        tokens = torch.cat(
            [self.embedding(feature), functional.embedding(location, self.codes), value.unsqueeze(-1)], -1
        )
        return tokens, self.inside[location] & (feature < self.num_features)


FUSED = "cpu"
"""Device type where torch's fused norm and attention are the fastest for narrow rows."""
ENCODING_GAIN = 0.1
"""Makes initial encodings about as small as those of a box; see `scale_down`."""
SIZE = 32
"""Size of queries, and of the vectors between layers."""


@dataclass(frozen=True)
class AttentionSizes:
    """Hyperparameters of an attention encoder."""

    embedding: int
    """Size of the feature embeddings."""
    frequencies: int
    """Frequencies of the position code, with four numbers each."""
    queries: int
    heads: int
    cross_layers: int
    self_layers: int
    """Self-attention layers over the queries; 0: the only query is the output."""


def split_heads(x: Float[Tensor, "N K D"], heads: int) -> Float[Tensor, "N heads K d"]:
    """Split the last axis into heads."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Float[Tensor, "N heads K d"]) -> Float[Tensor, "N K D"]:
    """Concatenate the heads."""
    return x.transpose(1, 2).flatten(2)


def attend(
    query: Float[Tensor, "N heads K d"],
    key: Float[Tensor, "N heads M d"],
    value: Float[Tensor, "N heads M d"],
    visible: Bool[Tensor, "N 1 1 M"] | None = None,
) -> Float[Tensor, "N heads K d"]:
    """Scaled dot-product attention: softmax(query key^T / sqrt(d)) value.

    The fused kernels of a GPU are made for wide heads and long rows: with heads of size 4 or 8 their
    backward takes three to six times as long as plain products. On the CPU it is the other way round.
    """
    if query.device.type == FUSED:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    score = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if visible is not None:
        score = score.masked_fill(~visible, -torch.inf)
    return score.softmax(-1) @ value


class Norm(nn.LayerNorm):
    """Layer normalization of narrow rows."""

    def forward(self, input: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Normalize every row to mean 0 and variance 1, then scale and shift it."""
        if input.device.type == FUSED:
            return super().forward(input)
        # torch's kernel uses a block of threads per row, however narrow.
        x = input - input.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


class CrossLayer(nn.Module):
    """Cross-attention from queries to tokens, then an MLP."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Norm(size)
        self.query = orthogonal(nn.Linear(size, size, bias=False))
        self.out = orthogonal(nn.Linear(size, size))
        self.norm2 = Norm(size)
        wide, narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.mlp = nn.Sequential(orthogonal(wide), nn.GELU(), orthogonal(narrow))

    def forward(
        self,
        x: Float[Tensor, "_N K D"],
        key: Float[Tensor, "N heads M d"],
        value: Float[Tensor, "N heads M d"],
        visible: Bool[Tensor, "N 1 1 M"],
    ) -> Float[Tensor, "N K D"]:
        """Attend from queries `[N,K,D]`, or the same `[1,K,D]` for all rows, to visible tokens."""
        query = split_heads(self.query(self.norm1(x)), self.heads).expand(len(key), -1, -1, -1)
        # Without a visible token the softmax is 0/0: attend to all, and multiply the result by 0.
        not_empty = visible.any(-1, keepdim=True)
        y = attend(query, key, value, visible | ~not_empty)
        x = x + self.out(join_heads(y * not_empty))
        return x + self.mlp(self.norm2(x))


class CrossAttention(nn.Module):
    """Layers of cross-attention from learned queries to tokens, with shared keys and values."""

    def __init__(
        self, token_size: int, *, queries: int, size: int, heads: int, layers: int, out: int | None, use_cls: bool
    ) -> None:
        super().__init__()
        self.heads, self.use_cls = heads, use_cls
        self.queries = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, queries, size), std=0.02))
        self.norm_tokens = Norm(token_size)
        self.key_value = orthogonal(nn.Linear(token_size, 2 * size, bias=False))
        self.layers = nn.ModuleList(CrossLayer(size, heads) for _ in range(layers))
        self.norm = Norm(size)
        self.out = nn.Identity() if out is None else orthogonal(nn.Linear(size, out))

    def forward(self, tokens: Float[Tensor, "N M D"], visible: Bool[Tensor, "N M"]) -> Float[Tensor, "N *K out"]:
        """Return a vector for each query, or with `use_cls` the first query's alone."""
        key, value = self.key_value(self.norm_tokens(tokens)).chunk(2, -1)
        key, value = split_heads(key, self.heads), split_heads(value, self.heads)
        # Queries do not attend to each other, so unused ones need not be computed.
        x = self.queries[:, :1] if self.use_cls else self.queries
        for layer in self.layers:
            x = layer(x, key, value, visible[:, None, None])
        x = self.out(self.norm(x))
        return x[:, 0] if self.use_cls else x


class SelfLayer(nn.Module):
    """One layer of self-attention."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = Norm(size)
        self.query_key_value = orthogonal(nn.Linear(size, 3 * size, bias=False))
        self.out = orthogonal(nn.Linear(size, size))

    def forward(self, x: Float[Tensor, "N K D"], num_outputs: int) -> Float[Tensor, "N K2 D"]:
        """Attend from the first `num_outputs` of `[N,K,D]` to all."""
        projections = self.query_key_value(self.norm(x)).chunk(3, -1)
        query, key, value = (split_heads(projection, self.heads) for projection in projections)
        y = attend(query[:, :, :num_outputs], key, value)
        return x[:, :num_outputs] + self.out(join_heads(y))


class SelfAttention(nn.Module):
    """Layers of self-attention with a learned class token, which is the output."""

    def __init__(self, size: int, *, heads: int, layers: int, out: int) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, size))
        self.layers = nn.ModuleList(SelfLayer(size, heads) for _ in range(layers))
        self.norm = Norm(size)
        self.out = orthogonal(nn.Linear(size, out))

    def forward(self, x: Float[Tensor, "N K D"]) -> Float[Tensor, "N out"]:
        """Reduce `[N,K,D]` to one vector per row."""
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            # Only the class token of the last layer is read.
            x = layer(x, 1 if layer is self.layers[-1] else x.shape[1])
        return self.out(self.norm(x[:, 0]))


@torch.no_grad()
def scale_down(attention: CrossAttention | SelfAttention, *blank: Tensor) -> None:
    """Initialize the output to zeros for a blank observation, and to small numbers for all others.

    Box encoders do so by themselves. The last norm would give every encoding a norm of 6.5, the blank
    one too: such a constant input saturates an LSTM's cells (norm 5, of which a cue moves 0.03), and
    each optimizer step moves them all at once.
    """
    if isinstance(attention.out, nn.Linear):
        attention.out.weight.mul_(ENCODING_GAIN)
        attention.out.bias.zero_().sub_(attention(*blank).flatten(0, -2)[0])


class AttentionEncoder(nn.Module):
    """Tokens -> embeddings -> learned queries -> one feature vector."""

    def __init__(
        self,
        features: Sequence[Feature],
        window: tuple[int, int],
        sizes: AttentionSizes,
        out: int,
        init: EncoderInit = "standard",
    ) -> None:
        super().__init__()
        std = EMBEDDING_STD if init == "standard" else ORIGINAL_STD
        self.embedding = TokenEmbedding(features, window, sizes.embedding, sizes.frequencies, std)
        cross_only = sizes.self_layers == 0
        self.cross_attention = CrossAttention(
            self.embedding.size,
            queries=sizes.queries,
            size=SIZE,
            heads=sizes.heads,
            layers=sizes.cross_layers,
            out=out if cross_only else None,
            use_cls=cross_only,
        )
        self.self_attention = (
            None if cross_only else SelfAttention(SIZE, heads=sizes.heads, layers=sizes.self_layers, out=out)
        )
        if init == "original":
            return
        with torch.no_grad():
            blank = self.embedding(empty(1, 1, self.embedding.codes.device))
            scale_down(self.cross_attention, *blank)
            if self.self_attention is not None:
                scale_down(self.self_attention, self.cross_attention(*blank))

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode `[N,M,3]` tokens."""
        x = self.cross_attention(*self.embedding(obs))
        return x if self.self_attention is None else self.self_attention(x)


class _LatentAttn(RecurrentPolicy):
    """Tokens -> attention -> memory -> actor and critic."""

    accepts_trimmed_obs = True

    sizes: ClassVar[AttentionSizes]

    def __init__(
        self,
        spec: WorldSpec,
        hidden_size: int = 128,
        num_layers: int = 2,
        *,
        encoder_init: EncoderInit = "standard",
        **memory: Any,
    ) -> None:
        require_tokens(type(self).__name__, spec)
        super().__init__(128, hidden_size, num_layers, **memory)
        self.encoder = AttentionEncoder(spec.features, spec.window, self.sizes, out=128, init=encoder_init)
        self.critic = Critic(hidden_size)
        self.actor = BilinearActor(hidden_size, spec.action_names)

    def encode(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode tokens."""
        return self.encoder(obs)

    def decode(self, features: Float[Tensor, "N H"]) -> PolicyOutput:
        """Return logits and values."""
        return PolicyOutput(self.actor(features), self.critic(features))


class LatentAttnTiny(_LatentAttn):
    """One query, two cross-attention layers: the fastest, and the least expressive."""

    sizes = AttentionSizes(embedding=10, frequencies=4, queries=1, heads=4, cross_layers=2, self_layers=0)


class LatentAttnSmall(_LatentAttn):
    """Ten queries, one cross-attention layer, two self-attention layers."""

    sizes = AttentionSizes(embedding=8, frequencies=8, queries=10, heads=4, cross_layers=1, self_layers=2)


class LatentAttnMed(_LatentAttn):
    """Ten queries, three cross-attention layers, three self-attention layers."""

    sizes = AttentionSizes(embedding=12, frequencies=8, queries=10, heads=8, cross_layers=3, self_layers=3)
