"""Attention encoders: learned queries gather what matters among token vectors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from holdfast.policies.encoders import orthogonal
from holdfast.policies.token_front import TokenFront
from holdfast.shapes import Bool, Float, Tensor, UInt8
from holdfast.worlds.step import Feature
from holdfast.worlds.tokens import empty

FUSED = "cpu"
"""Where torch's fused norm and attention are the fastest for rows as narrow as ours."""
ENCODING_GAIN = 0.1
"""Makes newborn encodings about as small as those of a box; see `quieten`."""
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
        self.key_value = orthogonal(nn.Linear(token_size, 2 * size, bias=False))
        self.layers = nn.ModuleList(CrossLayer(size, heads) for _ in range(layers))
        self.norm = Norm(size)
        self.out = nn.Identity() if out is None else orthogonal(nn.Linear(size, out))

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
        self.query_key_value = orthogonal(nn.Linear(size, 3 * size, bias=False))
        self.out = orthogonal(nn.Linear(size, size))

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
        self.out = orthogonal(nn.Linear(size, out))

    def forward(self, x: Float[Tensor, "N K D"]) -> Float[Tensor, "N out"]:
        """Say in one vector what `[N,K,D]` say."""
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            # Of the last layer only one answer is read.
            x = layer(x, 1 if layer is self.layers[-1] else x.shape[1])
        return self.out(self.norm(x[:, 0]))


@torch.no_grad()
def quieten(part: CrossAttention | SelfAttention, *nothing: Tensor) -> None:
    """Let a newborn say zeros to an observation of nothing, and small numbers to all others.

    Boxes do so by themselves. The last norm would make every encoding 6.5 long, that of nothing too: a
    drive that never ends fills an LSTM's cells (norm 5, of which a cue moves 0.03), and each step of the
    optimiser moves them all at once.
    """
    if isinstance(part.out, nn.Linear):
        part.out.weight.mul_(ENCODING_GAIN)
        part.out.bias.zero_().sub_(part(*nothing).flatten(0, -2)[0])


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
        with torch.no_grad():
            nothing = self.front(empty(1, 1, self.front.codes.device))
            quieten(self.cross_attention, *nothing)
            if self.self_attention is not None:
                quieten(self.self_attention, self.cross_attention(*nothing))

    def forward(self, obs: UInt8[Tensor, "N M 3"]) -> Float[Tensor, "N D"]:
        """Encode `[N,M,3]` tokens."""
        x = self.cross_attention(*self.front(obs))
        return x if self.self_attention is None else self.self_attention(x)
