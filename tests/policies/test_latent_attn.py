import math
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import make_policy, make_world
from holdfast.check.adapters import adapt
from holdfast.check.context import prepare
from holdfast.check.laws import measure
from holdfast.errors import ContractError
from holdfast.policies import POLICIES, LatentAttnMed, LatentAttnSmall, LatentAttnTiny, latent_attn
from holdfast.policies.latent_attn import (
    AttentionEncoder,
    CrossAttention,
    SelfAttention,
    TokenEmbedding,
    position_codes,
    strip_padding,
)
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.tokens import GLOBAL, PADDING, SHORTEST

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))
ORIGINAL = WorldSpec(obs_shape=(200, 3), action_names=tuple(f"action_{i}" for i in range(19)), features=FEATURES)
NAMES = {
    "latent_attn_tiny": LatentAttnTiny,
    "latent_attn_small": LatentAttnSmall,
    "latent_attn_med": LatentAttnMed,
}
STANDARD = {"hidden_size": 128, "num_layers": 2, "clear_on": "episode"}
KINDS = list(NAMES.values())


def count(module):
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("kind", "encoder", "total"),
    [(LatentAttnTiny, 29_782, 502_936), (LatentAttnSmall, 28_402, 501_556), (LatentAttnMed, 55_002, 528_156)],
)
def test_latent_attn_parameter_counts(kind, encoder, total):
    policy = kind(ORIGINAL)
    # The arithmetic of the encoders is below; the others are those of fast.
    assert count(policy.encoder) == encoder
    assert count(policy.lstm) == 264_192
    assert count(policy.critic) == 133_121
    assert count(policy.actor) == 75_841
    assert count(policy) == encoder + 264_192 + 133_121 + 75_841 == total


def test_latent_attn_initialization():
    torch.manual_seed(0)
    encoder = LatentAttnSmall(ORIGINAL).encoder
    table, queries = encoder.embedding.embedding.weight, encoder.cross_attention.queries
    assert table[PADDING].count_nonzero() == 0
    assert queries.std().item() == pytest.approx(0.02, rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_original_initialization(kind):
    torch.manual_seed(0)
    encoder = kind(ORIGINAL, encoder_init="original").encoder
    assert encoder.embedding.embedding.weight[:PADDING].std().item() == pytest.approx(0.02, rel=0.1)
    # The last norm gives every encoding about the same norm, the blank one too.
    with torch.no_grad():
        assert float(encoder(rows_of([], tokens=9)).norm()) > 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"hidden_size": 24, "num_layers": 1, "clear_on": "never"}])
def test_make_policy_by_name_and_unroll(name, options):
    world = make_world("recall", agents=5)
    policy = make_policy(name, world, seed=0, **options)
    assert type(policy) is POLICIES[name] is NAMES[name]
    options_set = ("hidden_size", "num_layers", "clear_on")
    assert [getattr(policy, key) for key in options_set] == [{**STANDARD, **options}[key] for key in options_set]
    obs = world.reset().obs
    state = policy.lstm.cell.initial(5)
    output, after = policy.unroll(obs, torch.ones(5, dtype=torch.bool), state)
    assert output.logits.shape == (5, 4)
    assert output.values.shape == (5,)
    assert after.batch_size == state.batch_size


@pytest.mark.parametrize("kind", KINDS)
def test_latent_attn_gradient_reaches_every_parameter(kind):
    torch.manual_seed(0)
    policy = kind(ORIGINAL)
    with torch.no_grad():
        for weight in policy.parameters():
            # Perturbed, because weights that start at zero would hide an error.
            weight.add_(0.05 * torch.randn_like(weight))
    features = torch.arange(25, dtype=torch.uint8).repeat(3, 8, 1)
    places = torch.randint(0, 11, features.shape, dtype=torch.uint8) * 17
    obs = torch.stack([places, features, features + 9], -1)
    output, _ = policy.unroll(obs, torch.zeros(3, 8, dtype=torch.bool), policy.lstm.cell.initial(3))
    (output.logits * torch.randn(19)).sum().add(output.values.sum()).backward()
    rows = {"encoder.embedding.embedding.weight": 25, "actor.embeddings.table.weight": 19}
    for name, weight in policy.named_parameters():
        used = weight.grad[: rows.get(name, len(weight))]
        # Units of the actor's ReLU may be off in all rows.
        assert (used != 0).double().mean() > (0.5 if name.startswith("actor") else 0.99), name


@pytest.mark.usefixtures("annotations_asleep")
@pytest.mark.parametrize("kind", KINDS)
def test_latent_attn_obeys_the_quick_laws(kind):
    torch.manual_seed(0)
    world = make_world("recall", agents=8)
    context = prepare(adapt(kind(world.spec, hidden_size=16), world))
    laws = list(measure(context, ["cut", "replay", "isolate", "pure", "restore"]))
    assert {law.name: law.finding for law in laws if not law.ok} == {}
    assert len(laws) == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_do_not_depend_on_other_rows_padding(kind, dtype):
    # The law `isolate` with trimmed padding, which the script of the check does not have.
    torch.manual_seed(0)
    policy = kind(ORIGINAL, hidden_size=16).to(dtype)
    short = torch.randint(0, 11, (8, 4, 200, 3), dtype=torch.uint8)
    full = short.clone()
    short[:, :, 20:] = PADDING
    full[0] = short[0]
    first = torch.zeros(8, 4, dtype=torch.bool)
    with torch.no_grad():
        alone, _ = policy.unroll(short, first, policy.lstm.cell.initial(8))
        others, _ = policy.unroll(full, first, policy.lstm.cell.initial(8))
    assert alone.logits[0].equal(others.logits[0])
    assert alone.values[0].equal(others.values[0])
    assert not alone.logits[1].equal(others.logits[1])


WINDOW = (11, 11)
EMPTY = (PADDING, PADDING, PADDING)

place = st.one_of(st.builds(lambda row, column: row << 4 | column, *[st.integers(0, 10)] * 2), st.just(GLOBAL))
token = st.tuples(place, st.integers(0, 24), st.integers(0, 255))


def make_encoder(kind, dtype=torch.float64, window=WINDOW):
    torch.manual_seed(0)
    encoder = AttentionEncoder(FEATURES, window, kind.sizes, out=128)
    with torch.no_grad():
        for weight in encoder.parameters():
            # Perturbed, because weights that start at zero would hide an error.
            weight.add_(0.1 * torch.randn_like(weight))
        encoder.embedding.embedding.weight[PADDING] = 0.0
    return encoder.to(dtype)


ENCODERS = {kind: make_encoder(kind) for kind in KINDS}


def rows_of(*rows, tokens=None):
    """Observations from lists of tokens, padded to the longest or to `tokens`."""
    width = tokens or max(1, *map(len, rows))
    filled = [[*row, *[EMPTY] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.uint8)


def encode(kind, *rows, tokens=None):
    with torch.no_grad():
        return ENCODERS[kind](rows_of(*rows, tokens=tokens))


def test_attention_parameter_counts():
    front = TokenEmbedding(FEATURES, WINDOW, embedding=10, frequencies=4)
    # 256 rows of 10; a token is 10 + 4*4 + 1 numbers
    assert (count(front), front.size) == (2_560, 27)
    cross = CrossAttention(27, queries=1, size=32, heads=4, layers=2, out=128, use_cls=True)
    # a layer: two norms 2*2*32, query 32*32, out 32*32+32, MLP 32*128+128 and 128*32+32
    layer = 128 + 1_024 + 1_056 + 4_224 + 4_128
    assert count(cross.layers[0]) == layer == 10_560
    # query 32, norm of tokens 2*27, key and value 2*27*32, layers, norm 2*32, out 32*128+128
    assert count(cross) == 32 + 54 + 1_728 + 2 * layer + 64 + 4_224 == 27_222
    attention = SelfAttention(32, heads=4, layers=2, out=128)
    # a layer: norm 2*32, query, key and value 3*32*32, out 32*32+32
    assert count(attention.layers[0]) == 64 + 3_072 + 1_056 == 4_192
    # cls 32, layers, norm 2*32, out 32*128+128
    assert count(attention) == 32 + 2 * 4_192 + 64 + 4_224 == 12_704


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
def test_attention_encoder_parameter_counts(kind, parameters):
    expected = {LatentAttnTiny: 29_782, LatentAttnSmall: 28_402, LatentAttnMed: 55_002}
    assert count(AttentionEncoder(FEATURES, WINDOW, kind.sizes, out=128)) == parameters == expected[kind]


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
def test_padding_does_not_matter(kind, tokens, mate, at, more):
    bare = encode(kind, tokens, mate)
    torch.testing.assert_close(encode(kind, tokens, mate, tokens=90 + more), bare, atol=1e-12, rtol=0)
    gap = [*tokens[:at], EMPTY, EMPTY, *tokens[at:]]
    torch.testing.assert_close(encode(kind, gap, mate), bare, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [40, 90, 200])
def test_encoding_is_bit_equal_whatever_other_rows_hold(kind, dtype, width):
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


def test_strip_padding():
    long = [(0x11, 1, 1)] * 90
    assert strip_padding(rows_of([], long, tokens=200)).shape == (2, 96, 3)
    assert strip_padding(rows_of(long, [], tokens=200))[:, :90].equal(rows_of(long, []))
    assert strip_padding(rows_of([EMPTY] * 89 + long[:1], tokens=200)).shape == (1, 96, 3)
    assert strip_padding(rows_of([], tokens=200)).shape == (1, SHORTEST, 3)
    assert strip_padding(rows_of(long[:1], tokens=SHORTEST - 1)).shape == (1, SHORTEST - 1, 3)
    assert strip_padding(rows_of(long, tokens=90))[:, 90:].tolist() == [[[255] * 3] * 6]


def cross_by_definition(cross, tokens, visible):
    """Cross-attention written out: einsums, a softmax over visible tokens, and torch's norm."""
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
def test_attention_equals_its_definition_on_every_device(kind, monkeypatch):
    encoder = make_encoder(kind)
    obs = rows_of([(0x12, 1, 9), (GLOBAL, 7, 90), (0xA0, 24, 30)], [(0x31, 7, 2), (0x00, 99, 9)], [])
    with torch.no_grad():
        fused = encoder(obs)
        plain = cross_by_definition(encoder.cross_attention, *encoder.embedding(obs))
        expected = plain[:, 0] if encoder.self_attention is None else encoder.self_attention(plain)
        torch.testing.assert_close(fused, expected, atol=1e-12, rtol=0)
        # The code path of a GPU: its own norm and plain products.
        monkeypatch.setattr(latent_attn, "FUSED", "nowhere")
        torch.testing.assert_close(encoder(obs), fused, atol=1e-12, rtol=0)


def test_strip_padding_does_not_synchronize_a_gpu():
    # Reading a tensor without data raises, where on a GPU it would synchronize.
    obs = torch.empty(2, 200, 3, dtype=torch.uint8, device="meta")
    assert strip_padding(obs).shape == (2, 200, 3)
    assert make_encoder(LatentAttnMed).to("meta")(obs).shape == (2, 128)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_empty_observation_is_finite_with_finite_gradients(kind, dtype):
    encoder = make_encoder(kind, dtype)
    assert encoder(rows_of([], [], tokens=200)).isfinite().all()
    out = encoder(rows_of([(0x55, 3, 9)], []))
    assert out.isfinite().all()
    assert not out[0].allclose(out[1])
    # A masked token is exactly the same as no token.
    hidden = encoder(rows_of([(0x55, 3, 9)], [(0x55, 200, 9)]))
    assert hidden.equal(out)
    hidden.sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())
    assert encoder.embedding.embedding.weight.grad[200].count_nonzero() == 0


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(
    tokens=st.lists(token, max_size=12),
    location=st.integers(0, 255),
    feature=st.integers(25, 255),
    value=st.integers(0, 255),
)
def test_unknown_features_are_masked(kind, tokens, location, feature, value):
    unknown = encode(kind, [*tokens, (location, feature, value)])
    torch.testing.assert_close(unknown, encode(kind, tokens), atol=1e-12, rtol=0)


@pytest.mark.parametrize("window", [(3, 3), (5, 7), (11, 11), (15, 15)])
def test_visible_mask_by_window(window):
    front = TokenEmbedding(FEATURES, window, embedding=8, frequencies=8)
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
def test_token_embedding_by_definition(tokens, window, frequencies):
    front = TokenEmbedding(FEATURES, window, embedding=6, frequencies=frequencies)
    vectors, _ = front(rows_of(tokens))
    for vector, (location, feature, value) in zip(vectors[0], tokens, strict=True):
        row, column = divmod(location, 16)
        if location == GLOBAL:
            row, column = window[0] // 2, window[1] // 2
        waves = [
            [wave((2 * place / 10 - 1) * 2**k) for k in range(frequencies)]
            for place in (row, column)
            for wave in (math.cos, math.sin)
        ]
        size = value / FEATURES[feature].normalization
        plain = torch.tensor([*chain(*waves), size])
        torch.testing.assert_close(vector[6:], plain, atol=2e-5, rtol=1e-6)
        assert vector[:6].equal(front.embedding.weight[feature])


def test_token_values_are_normalized_in_float():
    front = TokenEmbedding(FEATURES, WINDOW, embedding=8, frequencies=8)
    tokens, _ = front(rows_of([(0x00, 4, 1), (0x00, 6, 255)]))
    assert tokens[0, :, -1].tolist() == pytest.approx([0.2, 255 / 7])
    assert front.double()(rows_of([(0x00, 6, 1)]))[0][0, 0, -1].item() == pytest.approx(1 / 7, rel=1e-15)


@pytest.mark.parametrize("frequencies", [1, 4, 8])
def test_position_codes_are_distinct(frequencies):
    codes = position_codes(WINDOW, frequencies)
    places = [row << 4 | column for row in range(15) for column in range(15)]
    apart = torch.pdist(codes[places])
    # Neighbours are a fifth apart on the circle of the lowest frequency.
    assert apart.min() > 0.19
    assert codes[GLOBAL].equal(codes[0x55])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(one=place, other=place)
def test_encoding_depends_on_the_position(kind, one, other):
    same = one == other or {one, other} == {GLOBAL, 0x55}
    apart = (encode(kind, [(one, 2, 3)]) - encode(kind, [(other, 2, 3)])).abs().max()
    assert apart == 0.0 if same else apart > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_attention_gradient_reaches_every_used_parameter(kind):
    encoder = make_encoder(kind)
    features = [1, 7, 24]
    out = encoder(rows_of([(0x12, 1, 9), (GLOBAL, 7, 90), (0xA0, 24, 30)], [(0x31, 7, 2)], []))
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    for name, weight in encoder.named_parameters():
        if name == "embedding.embedding.weight":
            assert weight.grad.abs().sum(1).nonzero().flatten().tolist() == features
        else:
            assert (weight.grad != 0).all(), name


def test_more_features_than_ids_raise():
    with pytest.raises(ContractError, match="256 features; ids name at most 255"):
        TokenEmbedding(FEATURES[:1] * 256, WINDOW, 8, 8)
    TokenEmbedding(FEATURES[:1] * 255, WINDOW, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_encoding_of_a_blank_observation_is_zero(kind):
    torch.manual_seed(0)
    encoder = AttentionEncoder(FEATURES, WINDOW, kind.sizes, out=128)
    with torch.no_grad():
        assert encoder(rows_of([], tokens=9)).abs().max() < 1e-6
        features = encoder(rows_of([(0x45, 3, 4)], [(0x45, 5, 6)]))
    assert 0.005 < (features[0] - features[1]).norm() < 2
    assert 0.005 < features.norm(dim=-1).max() < 2
