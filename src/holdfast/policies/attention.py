"""Attention encoders: tokens become vectors, and learned queries gather what matters among them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from holdfast.errors import ContractError
from holdfast.policies.binding import ByName
from holdfast.shapes import Bool, Float, Tensor, UInt8
from holdfast.worlds.step import Feature
from holdfast.worlds.tokens import GLOBAL, PADDING, shorten

FUSED = "cpu"
"""Where torch's fused norm and attention are the fastest for rows as narrow as ours."""
EMBEDDING_STD = 0.02
SIZE = 32
"""Numbers of a query and of whatever it gathers."""


@dataclass(frozen=True)
class AttentionSizes:
    """What tells one attention encoder from another."""

    embedding: int
    """Learned numbers that say which feature a token is of."""
    frequencies: int
    """Frequencies that say where it is, with four numbers each."""
    queries: int
    heads: int
    cross_layers: int
    self_layers: int
    """Layers in which the queries look at each other; 0: the only query is the answer."""


def strip_padding(obs: UInt8[Tensor, "N M 3"]) -> UInt8[Tensor, "N M2 3"]:
    """Leave out the padding that all rows end in, where looking costs nothing: on the CPU.

    On a GPU the host would have to wait for the device at every call; there it was left out once a
    rollout by the collector, and the mask does the rest.
    """
    return shorten(obs) if obs.device.type == "cpu" else obs


def position_codes(window: tuple[int, int], frequencies: int) -> Float[Tensor, "256 codes"]:
    """Give every location byte its Fourier code: cosines and sines of row and column.

    Coordinates 0..10 become -1..1; a global token is at the centre of the window. At frequency 1 no two
    places share both cosine and sine, since even 14 becomes no more than 1.8.
    """
    location = torch.arange(256)
    row, column = location >> 4, location & 0x0F
    row[GLOBAL], column[GLOBAL] = window[0] // 2, window[1] // 2
    waves = [(place / 5.0 - 1.0)[:, None] * 2.0 ** torch.arange(frequencies) for place in (row, column)]
    return torch.cat([turn(wave) for wave in waves for turn in (torch.cos, torch.sin)], -1)


class TokenFront(ByName):
    """Turn each token into a vector: which feature, where, and how much of it.

    Padding, unknown features and places outside the window are told apart by a mask, and whoever reads
    the vectors must not look there.
    """

    knows = "features"

    def __init__(
        self, features: Sequence[Feature], window: tuple[int, int], embedding: int, frequencies: int
    ) -> None:
        super().__init__()
        if len(features) > PADDING:
            raise ContractError(f"The world has {len(features)} features; ids name at most {PADDING}.")
        self.size = embedding + 4 * frequencies + 1
        self.embedding = nn.Embedding(256, embedding, padding_idx=PADDING)
        nn.init.trunc_normal_(self.embedding.weight, std=EMBEDDING_STD)
        with torch.no_grad():
            self.embedding.weight[PADDING] = 0.0
        rows, columns = window
        location = torch.arange(256)
        inside = (location == GLOBAL) | ((location >> 4 < rows) & (location & 0x0F < columns))
        self.register_buffer("normalization", torch.ones(256))
        self.register_buffer("inside", inside, persistent=False)
        self.register_buffer("codes", position_codes(window, frequencies), persistent=False)
        self.normalization: Tensor
        self.inside: Tensor
        self.codes: Tensor
        self.know(features, ())

    def know(self, features: Sequence[Feature], actions: Sequence[str]) -> None:
        """Size features anew; those that were added have an embedding already, which nobody has used."""
        self.known = len(features)
        sizes = self.normalization.new_tensor([feature.normalization for feature in features])
        self.normalization[: self.known] = sizes

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> tuple[Float[Tensor, "N M2 D"], Bool[Tensor, "N M2"]]:
        """Turn `[N,M,3]` tokens into vectors, and say which of them are there to be seen."""
        obs = strip_padding(obs)
        location, feature = obs[..., 0].int(), obs[..., 1].int()
        # Bytes are few: what is known of each is looked up, not computed again for each token.
        value = obs[..., 2].to(self.normalization.dtype) / self.normalization[feature]
        tokens = torch.cat(
            [self.embedding(feature), functional.embedding(location, self.codes), value.unsqueeze(-1)], -1
        )
        return tokens, self.inside[location] & (feature < self.known)


def split_heads(x: Float[Tensor, "N K D"], heads: int) -> Float[Tensor, "N heads K d"]:
    """Give every head its share of the numbers."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Float[Tensor, "N heads K d"]) -> Float[Tensor, "N K D"]:
    """Put the shares of all heads side by side."""
    return x.transpose(1, 2).flatten(2)


def attend(
    query: Float[Tensor, "N heads K d"],
    key: Float[Tensor, "N heads M d"],
    value: Float[Tensor, "N heads M d"],
    visible: Bool[Tensor, "N 1 1 M"] | None = None,
) -> Float[Tensor, "N heads K d"]:
    """Gather values by how well keys fit queries: softmax(query key^T / sqrt(d)) value.

    The fused kernels of a GPU are made for wide heads and long rows: with heads of 4 or 8 numbers their
    backward takes three to six times as long as plain products. On the CPU it is the other way round.
    """
    if query.device.type == FUSED:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    score = (query * query.shape[-1] ** -0.5) @ key.transpose(-1, -2)
    if visible is not None:
        score = score.masked_fill(~visible, -torch.inf)
    return score.softmax(-1) @ value


class Norm(nn.Module):
    """Layer normalisation of narrow rows."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Float[Tensor, "*rows D"]) -> Float[Tensor, "*rows D"]:
        """Give every row mean 0 and variance 1, then scale and shift it."""
        if x.device.type == FUSED:
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias)
        # torch's kernel gives a whole block of threads to each row, be it as narrow as ours.
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias


class CrossLayer(nn.Module):
    """Queries gather from tokens, then each thinks about what it has."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = Norm(size)
        self.query = nn.Linear(size, size, bias=False)
        self.out = nn.Linear(size, size)
        self.norm2 = Norm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size))

    def forward(
        self,
        x: Float[Tensor, "_N K D"],
        key: Float[Tensor, "N heads M d"],
        value: Float[Tensor, "N heads M d"],
        visible: Bool[Tensor, "N 1 1 M"],
    ) -> Float[Tensor, "N K D"]:
        """Let queries `[N,K,D]`, or the same `[1,K,D]` for all rows, look where tokens are visible."""
        query = split_heads(self.query(self.norm1(x)), self.heads).expand(len(key), -1, -1, -1)
        # Where there is nothing to see a softmax is 0/0: there all is looked at, and counts for nothing.
        anything = visible.any(-1, keepdim=True)
        seen = attend(query, key, value, visible | ~anything)
        x = x + self.out(join_heads(seen * anything))
        return x + self.mlp(self.norm2(x))


class CrossAttention(nn.Module):
    """Learned queries look at tokens, layer after layer; keys and values are the same for all layers."""

    def __init__(
        self,
        token_size: int,
        *,
        queries: int,
        size: int,
        heads: int,
        layers: int,
        out: int | None = None,
        use_cls: bool = False,
    ) -> None:
        super().__init__()
        self.heads, self.use_cls = heads, use_cls
        self.queries = nn.Parameter(nn.init.trunc_normal_(torch.empty(1, queries, size), std=0.02))
        self.norm_tokens = Norm(token_size)
        self.key_value = nn.Linear(token_size, 2 * size, bias=False)
        self.layers = nn.ModuleList(CrossLayer(size, heads) for _ in range(layers))
        self.norm = Norm(size)
        self.out = nn.Identity() if out is None else nn.Linear(size, out)

    def forward(
        self, tokens: Float[Tensor, "N M D"], visible: Bool[Tensor, "N M"]
    ) -> Float[Tensor, "N *K out"]:
        """Gather from tokens: a vector for each query, or with `use_cls` the first query's alone."""
        key, value = self.key_value(self.norm_tokens(tokens)).chunk(2, -1)
        key, value = split_heads(key, self.heads), split_heads(value, self.heads)
        # Queries do not look at each other: those nobody reads need not look at all.
        x = self.queries[:, :1] if self.use_cls else self.queries
        for layer in self.layers:
            x = layer(x, key, value, visible[:, None, None])
        x = self.out(self.norm(x))
        return x[:, 0] if self.use_cls else x


class SelfLayer(nn.Module):
    """Everyone looks at everyone."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = Norm(size)
        self.query_key_value = nn.Linear(size, 3 * size, bias=False)
        self.out = nn.Linear(size, size)

    def forward(self, x: Float[Tensor, "N K D"], answers: int) -> Float[Tensor, "N answers D"]:
        """Let the first `answers` of `[N,K,D]` look at all."""
        parts = self.query_key_value(self.norm(x)).chunk(3, -1)
        query, key, value = (split_heads(part, self.heads) for part in parts)
        seen = attend(query[:, :, :answers], key, value)
        return x[:, :answers] + self.out(join_heads(seen))


class SelfAttention(nn.Module):
    """A learned token of its own looks at all others, and they at each other; its answer is the output."""

    def __init__(self, size: int, *, heads: int, layers: int, out: int) -> None:
        super().__init__()
        self.cls = nn.Parameter(torch.randn(1, 1, size))
        self.layers = nn.ModuleList(SelfLayer(size, heads) for _ in range(layers))
        self.norm = Norm(size)
        self.out = nn.Linear(size, out)

    def forward(self, x: Float[Tensor, "N K D"]) -> Float[Tensor, "N out"]:
        """Say in one vector what `[N,K,D]` say."""
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            # Of the last layer only one answer is read.
            x = layer(x, 1 if layer is self.layers[-1] else x.shape[1])
        return self.out(self.norm(x[:, 0]))


class AttentionEncoder(nn.Module):
    """Tokens -> vectors -> learned queries -> one feature vector."""

    def __init__(
        self, features: Sequence[Feature], window: tuple[int, int], sizes: AttentionSizes, out: int
    ) -> None:
        super().__init__()
        self.front = TokenFront(features, window, sizes.embedding, sizes.frequencies)
        alone = sizes.self_layers == 0
        self.cross_attention = CrossAttention(
            self.front.size,
            queries=sizes.queries,
            size=SIZE,
            heads=sizes.heads,
            layers=sizes.cross_layers,
            out=out if alone else None,
            use_cls=alone,
        )
        self.self_attention = (
            None if alone else SelfAttention(SIZE, heads=sizes.heads, layers=sizes.self_layers, out=out)
        )

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode `[N,M,3]` tokens."""
        x = self.cross_attention(*self.front(obs))
        return x if self.self_attention is None else self.self_attention(x)
