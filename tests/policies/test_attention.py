import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.policies import attention
from holdfast.policies.attention import (
    AttentionEncoder,
    CrossAttention,
    SelfAttention,
)
from holdfast.policies.latent_attn import LatentAttnMed, LatentAttnSmall, LatentAttnTiny
from holdfast.policies.token_front import TokenFront, position_codes, strip_padding
from holdfast.worlds import Feature
from holdfast.worlds.tokens import GLOBAL, PADDING, SHORTEST

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))
WINDOW = (11, 11)
KINDS = [LatentAttnTiny, LatentAttnSmall, LatentAttnMed]
EMPTY = (PADDING, PADDING, PADDING)

place = st.one_of(
    st.builds(lambda row, column: row << 4 | column, *[st.integers(0, 10)] * 2), st.just(GLOBAL)
)
token = st.tuples(place, st.integers(0, 24), st.integers(0, 255))


def make_encoder(kind, dtype=torch.float64, window=WINDOW):
    torch.manual_seed(0)
    encoder = AttentionEncoder(FEATURES, window, kind.sizes, out=128)
    with torch.no_grad():
        for each in encoder.parameters():
            # No weight is at rest: what happens to start at zero hides what it would do.
            each.add_(0.1 * torch.randn_like(each))
        encoder.front.embedding.weight[PADDING] = 0.0
    return encoder.to(dtype)


ENCODERS = {kind: make_encoder(kind) for kind in KINDS}


def rows_of(*rows, tokens=None):
    """Observations from lists of tokens, padded to the longest or to so many tokens."""
    width = tokens or max(1, *map(len, rows))
    filled = [[*row, *[EMPTY] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.uint8)


def encode(kind, *rows, tokens=None):
    with torch.no_grad():
        return ENCODERS[kind](rows_of(*rows, tokens=tokens))


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_parameters_of_the_parts_are_counted_as_in_the_original():
    front = TokenFront(FEATURES, WINDOW, embedding=10, frequencies=4)
    # 256 rows of 10; a token is 10 + 4*4 + 1 numbers
    assert (count(front), front.size) == (2_560, 27)
    cross = CrossAttention(27, queries=1, size=32, heads=4, layers=2, out=128, use_cls=True)
    # a layer: two norms 2*2*32, query 32*32, out 32*32+32, MLP 32*128+128 and 128*32+32
    layer = 128 + 1_024 + 1_056 + 4_224 + 4_128
    assert count(cross.layers[0]) == layer == 10_560
    # query 32, norm of tokens 2*27, key and value 2*27*32, layers, norm 2*32, out 32*128+128
    assert count(cross) == 32 + 54 + 1_728 + 2 * layer + 64 + 4_224 == 27_222
    looks = SelfAttention(32, heads=4, layers=2, out=128)
    # a layer: norm 2*32, query, key and value 3*32*32, out 32*32+32
    assert count(looks.layers[0]) == 64 + 3_072 + 1_056 == 4_192
    # cls 32, layers, norm 2*32, out 32*128+128
    assert count(looks) == 32 + 2 * 4_192 + 64 + 4_224 == 12_704


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        # embeddings 256*10, cross attention as above
        (LatentAttnTiny, 2_560 + 27_222),
        # embeddings 256*8; 10 queries, norm 2*41, key and value 2*41*32, 1 layer, norm; self attention
        (LatentAttnSmall, 2_048 + 320 + 82 + 2_624 + 10_560 + 64 + 12_704),
        # embeddings 256*12; 10 queries, norm 2*45, key and value 2*45*32, 3 layers, norm; one layer more
        (LatentAttnMed, 3_072 + 320 + 90 + 2_880 + 3 * 10_560 + 64 + 12_704 + 4_192),
    ],
)
def test_parameters_of_the_encoders_are_counted_as_in_the_original(kind, parameters):
    told = {LatentAttnTiny: 29_782, LatentAttnSmall: 28_402, LatentAttnMed: 55_002}
    assert count(AttentionEncoder(FEATURES, WINDOW, kind.sizes, out=128)) == parameters == told[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(tokens=st.lists(token, min_size=2, max_size=90), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_tokens_does_not_matter(kind, tokens, shuffle):
    mixed = tokens.copy()
    shuffle.shuffle(mixed)
    torch.testing.assert_close(encode(kind, mixed), encode(kind, tokens), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    tokens=st.lists(token, max_size=90),
    mate=st.lists(token, max_size=90),
    at=st.integers(0, 60),
    more=st.integers(0, 140),
)
def test_padding_changes_nothing_wherever_and_however_much(kind, tokens, mate, at, more):
    bare = encode(kind, tokens, mate)
    torch.testing.assert_close(encode(kind, tokens, mate, tokens=90 + more), bare, atol=1e-12, rtol=0)
    gap = [*tokens[:at], EMPTY, EMPTY, *tokens[at:]]
    torch.testing.assert_close(encode(kind, gap, mate), bare, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [40, 90, 200])
def test_how_much_batch_mates_see_is_not_felt_to_the_last_bit(kind, dtype, width):
    encoder = make_encoder(kind, dtype)
    generator = torch.Generator().manual_seed(0)
    obs = torch.randint(0, 25, (8, width, 3), generator=generator).to(torch.uint8)
    obs[..., 0] = obs[..., 0] % 11 * 16 + 3
    short = obs.clone()
    short[:, 30:] = PADDING
    with torch.no_grad():
        alone = encoder(short)
        for longest in range(31, width, 13):
            mates = short.clone()
            mates[1:, :longest] = obs[1:, :longest]
            assert encoder(mates)[0].equal(alone[0])


def test_only_padding_that_all_rows_end_in_is_left_out():
    long = [(0x11, 1, 1)] * 90
    assert strip_padding(rows_of([], long, tokens=200)).shape == (2, 96, 3)
    assert strip_padding(rows_of(long, [], tokens=200))[:, :90].equal(rows_of(long, []))
    assert strip_padding(rows_of([EMPTY] * 89 + long[:1], tokens=200)).shape == (1, 96, 3)
    assert strip_padding(rows_of([], tokens=200)).shape == (1, SHORTEST, 3)
    assert strip_padding(rows_of(long[:1], tokens=SHORTEST - 1)).shape == (1, SHORTEST - 1, 3)
    assert strip_padding(rows_of(long, tokens=90))[:, 90:].tolist() == [[[255] * 3] * 6]


def cross_by_definition(cross, tokens, visible):
    """Cross attention written out: einsums, a softmax over what is visible, and torch's own norm."""
    parts = cross.state_dict()

    def norm(x, name):
        return torch.nn.functional.layer_norm(x, x.shape[-1:], parts[f"{name}.weight"], parts[f"{name}.bias"])

    key, value = (norm(tokens, "norm_tokens") @ parts["key_value.weight"].T).chunk(2, -1)
    x = parts["queries"].expand(len(tokens), -1, -1)
    for n, layer in enumerate(cross.layers):
        query = norm(x, f"layers.{n}.norm1") @ parts[f"layers.{n}.query.weight"].T
        split = [part.unflatten(-1, (layer.heads, -1)) for part in (query, key, value)]
        score = torch.einsum("nqhd,nmhd->nhqm", *split[:2]) / split[0].shape[-1] ** 0.5
        score = score.exp() * visible[:, None, None]
        share = score / score.sum(-1, keepdim=True).clamp(min=1e-300)
        x = x + layer.out(torch.einsum("nhqm,nmhd->nqhd", share, split[2]).flatten(2))
        x = x + layer.mlp(norm(x, f"layers.{n}.norm2"))
    return cross.out(norm(x, "norm"))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_what_its_definition_says_on_every_device(kind, monkeypatch):
    encoder = make_encoder(kind)
    obs = rows_of([(0x12, 1, 9), (GLOBAL, 7, 90), (0xA0, 24, 30)], [(0x31, 7, 2), (0x00, 99, 9)], [])
    with torch.no_grad():
        fused = encoder(obs)
        plain = cross_by_definition(encoder.cross_attention, *encoder.front(obs))
        seen = plain[:, 0] if encoder.self_attention is None else encoder.self_attention(plain)
        torch.testing.assert_close(fused, seen, atol=1e-12, rtol=0)
        # What a GPU computes, here: its own norm and plain products.
        monkeypatch.setattr(attention, "FUSED", "nowhere")
        torch.testing.assert_close(encoder(obs), fused, atol=1e-12, rtol=0)


def test_on_other_devices_nobody_looks():
    # Looking at a tensor without data is an error, as it is a wait on a GPU.
    obs = torch.empty(2, 200, 3, dtype=torch.uint8, device="meta")
    assert strip_padding(obs).shape == (2, 200, 3)
    assert make_encoder(LatentAttnMed).to("meta")(obs).shape == (2, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_empty_observation_is_finite_and_so_are_its_gradients(kind, dtype):
    encoder = make_encoder(kind, dtype)
    assert encoder(rows_of([], [], tokens=200)).isfinite().all()
    out = encoder(rows_of([(0x55, 3, 9)], []))
    assert out.isfinite().all()
    assert not out[0].allclose(out[1])
    # Nothing is nothing: what is there but may not be seen does not leak into it by a bit.
    hidden = encoder(rows_of([(0x55, 3, 9)], [(0x55, 200, 9)]))
    assert hidden.equal(out)
    hidden.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    assert encoder.front.embedding.weight.grad[200].count_nonzero() == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    tokens=st.lists(token, max_size=12),
    location=st.integers(0, 255),
    feature=st.integers(25, 255),
    value=st.integers(0, 255),
)
def test_unknown_features_are_not_seen(kind, tokens, location, feature, value):
    unknown = encode(kind, [*tokens, (location, feature, value)])
    torch.testing.assert_close(unknown, encode(kind, tokens), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [(3, 3), (5, 7), (11, 11), (15, 15)])
def test_a_token_is_seen_where_it_has_a_place(window):
    front = TokenFront(FEATURES, window, embedding=8, frequencies=8)
    obs = torch.tensor([[(place, 4, 1) for place in range(256)]], dtype=torch.uint8)
    _, visible = front(obs)
    for location in range(256):
        inside = location >> 4 < window[0] and location & 15 < window[1]
        assert visible[0, location].item() == (inside or location == GLOBAL)


@settings(max_examples=40)
@given(
    tokens=st.lists(token, min_size=1, max_size=8),
    window=st.sampled_from([(3, 3), (11, 11), (15, 15)]),
    frequencies=st.integers(1, 8),
)
def test_a_token_is_its_embedding_its_place_and_its_value(tokens, window, frequencies):
    front = TokenFront(FEATURES, window, embedding=6, frequencies=frequencies)
    made, _ = front(rows_of(tokens))
    for vector, (location, feature, value) in zip(made[0], tokens, strict=True):
        row, column = divmod(location, 16)
        if location == GLOBAL:
            row, column = window[0] // 2, window[1] // 2
        turns = [
            [turn((2 * place / 10 - 1) * 2**k) for k in range(frequencies)]
            for place in (row, column)
            for turn in (math.cos, math.sin)
        ]
        size = value / FEATURES[feature].normalization
        plain = torch.tensor([*chain(*turns), size])
        torch.testing.assert_close(vector[6:], plain, atol=2e-5, rtol=1e-6)
        assert vector[:6].equal(front.embedding.weight[feature])


def test_values_are_divided_in_float():
    front = TokenFront(FEATURES, WINDOW, embedding=8, frequencies=8)
    tokens, _ = front(rows_of([(0x00, 4, 1), (0x00, 6, 255)]))
    assert tokens[0, :, -1].tolist() == pytest.approx([0.2, 255 / 7])
    assert front.double()(rows_of([(0x00, 6, 1)]))[0][0, 0, -1].item() == pytest.approx(1 / 7, rel=1e-15)


@pytest.mark.parametrize("frequencies", [1, 4, 8])
def test_positions_are_told_apart(frequencies):
    codes = position_codes(WINDOW, frequencies)
    places = [row << 4 | column for row in range(15) for column in range(15)]
    apart = torch.pdist(codes[places])
    # Neighbours are a fifth apart on the circle of the lowest frequency.
    assert apart.min() > 0.19
    assert codes[GLOBAL].equal(codes[0x55])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(one=place, other=place)
def test_where_a_token_is_makes_a_difference(kind, one, other):
    same = one == other or {one, other} == {GLOBAL, 0x55}
    apart = (encode(kind, [(one, 2, 3)]) - encode(kind, [(other, 2, 3)])).abs().max()
    assert apart == 0.0 if same else apart > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_that_is_used_is_reached(kind):
    encoder = make_encoder(kind)
    shown = [1, 7, 24]
    out = encoder(rows_of([(0x12, 1, 9), (GLOBAL, 7, 90), (0xA0, 24, 30)], [(0x31, 7, 2)], []))
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    for name, each in encoder.named_parameters():
        if name == "front.embedding.weight":
            assert each.grad.abs().sum(1).nonzero().flatten().tolist() == shown
        else:
            assert (each.grad != 0).all(), name


def test_more_features_than_ids_are_told():
    with pytest.raises(ContractError, match="256 features; ids name at most 255"):
        TokenFront(FEATURES[:1] * 256, WINDOW, 8, 8)
    TokenFront(FEATURES[:1] * 255, WINDOW, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_newborn_says_nothing_to_nothing_and_little_to_all_else(kind):
    torch.manual_seed(0)
    encoder = AttentionEncoder(FEATURES, WINDOW, kind.sizes, out=128)
    with torch.no_grad():
        assert encoder(rows_of([], tokens=9)).abs().max() < 1e-6
        seen = encoder(rows_of([(0x45, 3, 4)], [(0x45, 5, 6)]))
    assert 0.005 < (seen[0] - seen[1]).norm() < 2
    assert 0.005 < seen.norm(dim=-1).max() < 2
