import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import Fast, make_policy, make_world
from holdfast.errors import ConfigError, ContractError
from holdfast.policies.encoders import BoxEncoder, Conv, TokensToBox
from holdfast.worlds import Feature, WorldSpec
from holdfast.worlds.tokens import GLOBAL, PADDING

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))
ORIGINAL = WorldSpec(
    obs_shape=(200, 3), action_names=tuple(f"action_{i}" for i in range(19)), features=FEATURES
)


def count(module):
    return sum(p.numel() for p in module.parameters())


def test_parameters_are_counted_as_in_the_original():
    policy = Fast(ORIGINAL)
    # conv 25*64*5*5+64, conv 64*64*3*3+64, linear 64*128+128, linear 128*128+128
    assert count(policy.encoder) == 40_064 + 36_928 + 8_320 + 16_512 == 101_824
    # 2 layers of 4*128*(128+128) weights and 2*4*128 biases
    assert count(policy.lstm) == 2 * (131_072 + 1_024) == 264_192
    # linear 128*1024+1024, linear 1024+1
    assert count(policy.critic) == 132_096 + 1_025 == 133_121
    # linear 128*512+512, bilinear 512*16+1, embeddings 100*16
    assert count(policy.actor) == 66_048 + 8_193 + 1_600 == 75_841
    assert count(policy) == 574_978


def test_initial_weights_are_as_in_the_original():
    policy = Fast(ORIGINAL)
    wide = policy.critic.fc1.weight
    torch.testing.assert_close(wide.T @ wide, 2 * torch.eye(128), atol=1e-4, rtol=0)
    narrow = policy.encoder.fc2.weight
    torch.testing.assert_close(narrow.T @ narrow, torch.eye(128), atol=1e-4, rtol=0)
    assert math.isclose(policy.actor.embeddings.table.weight.abs().max().item(), 0.1, rel_tol=1e-6)
    assert policy.actor.scores.weight.abs().max() <= 1 / math.sqrt(512)
    assert (policy.encoder.conv1.bias == 0).all()


def plain_box(obs, features, window):
    """The box by its definition, token by token."""
    rows, columns = max(11, window[0]), max(11, window[1])
    box = torch.zeros(len(obs), len(features), rows, columns)
    for n, observation in enumerate(obs.tolist()):
        for location, feature, value in observation:
            if location == PADDING or feature >= len(features):
                continue
            row, column = location >> 4, location & 15
            if location == GLOBAL:
                row, column = rows // 2, columns // 2
            elif row >= window[0] or column >= window[1]:
                continue
            else:
                row, column = row + (rows - window[0]) // 2, column + (columns - window[1]) // 2
            size = value / features[feature].normalization
            box[n, feature, row, column] = max(size, box[n, feature, row, column])
    return box


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.lists(st.tuples(*[st.integers(0, 255)] * 3), min_size=1, max_size=12),
    places=st.lists(
        st.sampled_from([GLOBAL, PADDING, 0x00, 0x55, 0xAA, 0xBB, 0xE0, 0x0E]), min_size=1, max_size=6
    ),
    window=st.sampled_from([(11, 11), (3, 3), (5, 7), (13, 13), (15, 15)]),
)
def test_any_tokens_land_where_they_belong_and_nowhere_else(tokens, places, window):
    tokens = tokens + [(place, 3, 200) for place in places]
    obs = torch.tensor([tokens, tokens[::-1]], dtype=torch.uint8)
    box = TokensToBox(FEATURES[:9], window)(obs)
    torch.testing.assert_close(box, plain_box(obs, FEATURES[:9], window))


def test_the_larger_of_two_tokens_on_one_cell_wins():
    obs = torch.tensor([[[0x55, 2, 9], [0x55, 2, 30], [GLOBAL, 2, 12]]], dtype=torch.uint8)
    box = TokensToBox(FEATURES, (11, 11))(obs)
    assert box[0, 2, 5, 5] == 10.0
    assert box.count_nonzero() == 1


@pytest.mark.parametrize("window", [(3, 3), (11, 11), (13, 13), (15, 15), (9, 15)])
def test_every_window_has_a_box_and_a_fitting_encoder(window):
    encoder = BoxEncoder(FEATURES, window, size=128)
    obs = torch.full((2, 4, 3), PADDING, dtype=torch.uint8)
    assert encoder(obs).shape == (2, 128)


def test_values_are_divided_in_float():
    obs = torch.tensor([[[0x00, 4, 1]]], dtype=torch.uint8)
    assert TokensToBox(FEATURES, (11, 11))(obs)[0, 4, 0, 0] == pytest.approx(0.2)


def test_too_many_actions_are_told():
    with pytest.raises(ContractError, match="101 actions"):
        Fast(WorldSpec((4, 3), tuple(map(str, range(101))), FEATURES))


def test_weights_depend_on_the_seed_alone():
    world = make_world("recall", agents=2)
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    a = make_policy("fast", world, seed=3)
    assert torch.random.get_rng_state().equal(before)
    torch.manual_seed(9)
    b = make_policy("auto", world, seed=3)
    c = make_policy("fast", world, seed=4)
    assert all(x.equal(y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not all(x.equal(y) for x, y in zip(a.parameters(), c.parameters(), strict=True))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("fats", "did you mean fast"),
        ("transformer", "there is fast"),
        ("no_such_package:Policy", "no_such_package"),
        ("small:NoSuchClass", "has no class"),
        ("small:OnlySpec", "not a subclass"),
        ("holdfast:LSTMWrapper", "LSTMWrapper is a base to build on"),
        ("holdfast:RecurrentPolicy", "RecurrentPolicy is a base to build on"),
        (":Class", "write package.module:Class"),
        (".small:Small", "write package.module:Class"),
        ("small:", "write package.module:Class"),
        ("small:Small:", "write package.module:Class"),
    ],
)
def test_a_policy_that_cannot_be_found_says_what_to_type(name, told):
    with pytest.raises(ConfigError, match=told):
        make_policy(name, make_world("recall", agents=1))


def test_a_class_of_ones_own_is_found_by_its_path():
    from small import OnlySpec

    assert type(make_policy("small:Small", OnlySpec())).__name__ == "Small"


@pytest.mark.parametrize("asked", [False, True])
@settings(max_examples=30, deadline=None)
@given(
    side=st.tuples(st.integers(3, 13), st.integers(3, 13)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    rows=st.integers(1, 4),
)
def test_a_convolution_is_one_however_it_is_computed(asked, side, kernel, stride, rows):
    torch.manual_seed(0)
    layer = Conv(3, 4, kernel_size=kernel, stride=stride).double()
    plain = torch.nn.Conv2d(3, 4, kernel_size=kernel, stride=stride).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(rows, 3, *side, dtype=torch.float64)
    gradients = []
    for each in (layer, plain):
        seen = x.clone().requires_grad_(asked)
        said = each(seen)
        (said * torch.arange(said.numel()).reshape(said.shape)).sum().backward()
        gradients.append([each.weight.grad, each.bias.grad, *([seen.grad] if asked else [])])
    torch.testing.assert_close(layer(x), plain(x), atol=1e-12, rtol=1e-12)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-12)


def test_patches_are_the_same_wherever_they_are_taken(monkeypatch):
    layer, x = Conv(3, 4, kernel_size=5, stride=3), torch.randn(7, 3, 11, 14)
    gathered = layer(x)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    monkeypatch.setattr(torch, "arange", None)
    assert layer(x).equal(gathered)


def test_a_convolution_that_covers_its_picture_is_a_product():
    torch.manual_seed(0)
    layer, x = Conv(3, 4, kernel_size=3).double(), torch.randn(2, 3, 3, 3, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)


def test_no_rows_are_convolved_to_no_rows():
    assert Conv(3, 4, kernel_size=3)(torch.zeros(0, 3, 3, 3)).shape == (0, 4, 1, 1)
    assert Conv(3, 4, kernel_size=3, stride=2)(torch.zeros(0, 3, 7, 9)).shape == (0, 4, 3, 4)
    with pytest.raises(TypeError, match="padding"):
        Conv(3, 4, kernel_size=3, padding=1)


class NoMemoryOptions(Fast):
    def __init__(self, spec, hidden_size=8):
        super().__init__(spec, hidden_size)


def test_what_a_class_of_ones_own_does_not_take_is_told():
    with pytest.raises(ConfigError, match=r"'clear_on'\); write def __init__\(self, spec, hidden_size=64"):
        make_policy(f"{__name__}:NoMemoryOptions", make_world("recall", agents=1), clear_on="never")
