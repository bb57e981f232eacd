import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.policies.encoders import MANY_ROWS, BoxEncoder, Conv, LinearLayer, TokensToBox
from holdfast.worlds import Feature
from holdfast.worlds.tokens import GLOBAL, PADDING

FEATURES = tuple(Feature(f"feature_{i}", float(i + 1)) for i in range(25))


def plain_box(obs, features, window):
    """The box by definition, token by token."""
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
    places=st.lists(st.sampled_from([GLOBAL, PADDING, 0x00, 0x55, 0xAA, 0xBB, 0xE0, 0x0E]), min_size=1, max_size=6),
    window=st.sampled_from([(11, 11), (3, 3), (5, 7), (13, 13), (15, 15)]),
)
def test_tokens_to_box_by_definition(tokens, places, window):
    tokens = tokens + [(place, 3, 200) for place in places]
    obs = torch.tensor([tokens, tokens[::-1]], dtype=torch.uint8)
    box = TokensToBox(FEATURES[:9], window)(obs)
    torch.testing.assert_close(box, plain_box(obs, FEATURES[:9], window))


def test_larger_of_two_tokens_on_one_cell_counts():
    obs = torch.tensor([[[0x55, 2, 9], [0x55, 2, 30], [GLOBAL, 2, 12]]], dtype=torch.uint8)
    box = TokensToBox(FEATURES, (11, 11))(obs)
    assert box[0, 2, 5, 5] == 10.0
    assert box.count_nonzero() == 1


@pytest.mark.parametrize("window", [(3, 3), (11, 11), (13, 13), (15, 15), (9, 15)])
def test_box_encoder_takes_every_window(window):
    encoder = BoxEncoder(FEATURES, window, size=128)
    obs = torch.full((2, 4, 3), PADDING, dtype=torch.uint8)
    assert encoder(obs).shape == (2, 128)


def test_box_values_are_normalized_in_float():
    obs = torch.tensor([[[0x00, 4, 1]]], dtype=torch.uint8)
    assert TokensToBox(FEATURES, (11, 11))(obs)[0, 4, 0, 0] == pytest.approx(0.2)


@pytest.mark.parametrize("input_gradient", [False, True])
@settings(max_examples=30, deadline=None)
@given(
    side=st.tuples(st.integers(3, 13), st.integers(3, 13)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    rows=st.integers(1, 4),
)
def test_conv_equals_torch_conv2d(input_gradient, side, kernel, stride, rows):
    torch.manual_seed(0)
    layer = Conv(3, 4, kernel_size=kernel, stride=stride).double()
    plain = torch.nn.Conv2d(3, 4, kernel_size=kernel, stride=stride).double()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(rows, 3, *side, dtype=torch.float64)
    gradients = []
    for conv in (layer, plain):
        images = x.clone().requires_grad_(input_gradient)
        y = conv(images)
        (y * torch.arange(y.numel()).reshape(y.shape)).sum().backward()
        gradients.append([conv.weight.grad, conv.bias.grad, *([images.grad] if input_gradient else [])])
    torch.testing.assert_close(layer(x), plain(x), atol=1e-12, rtol=1e-12)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-12)


def test_conv_patches_by_index_equal_unfold(monkeypatch):
    layer, x = Conv(3, 4, kernel_size=5, stride=3), torch.randn(7, 3, 11, 14)
    gathered = layer(x)
    monkeypatch.setattr("holdfast.policies.encoders.is_exporting", lambda: True)
    monkeypatch.setattr(torch, "arange", None)
    assert layer(x).equal(gathered)


def test_conv_over_the_whole_image_is_a_product():
    torch.manual_seed(0)
    layer, x = Conv(3, 4, kernel_size=3).double(), torch.randn(2, 3, 3, 3, dtype=torch.float64)
    expected = torch.nn.functional.conv2d(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), expected, atol=1e-12, rtol=0)


def test_conv_of_zero_rows():
    assert Conv(3, 4, kernel_size=3)(torch.zeros(0, 3, 3, 3)).shape == (0, 4, 1, 1)
    assert Conv(3, 4, kernel_size=3, stride=2)(torch.zeros(0, 3, 7, 9)).shape == (0, 4, 3, 4)
    with pytest.raises(TypeError, match="padding"):
        Conv(3, 4, kernel_size=3, padding=1)


@pytest.mark.parametrize("rows", [MANY_ROWS - 1, MANY_ROWS, 5 * MANY_ROWS])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_linear_layer_equals_that_of_torch(rows, bias, dtype):
    torch.manual_seed(0)
    layer = LinearLayer(13, 9, bias=bias).to(dtype)
    x, grad = torch.randn(rows, 13, dtype=dtype), torch.randn(rows, 9, dtype=dtype)
    results = []
    for forward in (layer, lambda x: torch.nn.functional.linear(x, layer.weight, layer.bias)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = forward(leaf)
        y.backward(grad)
        results.append([y, leaf.grad, *(weight.grad for weight in layer.parameters())])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_linear_layer_is_onednn_for_many_rows_only():
    layer = LinearLayer(3, 2)
    names = [type(layer(torch.zeros(rows, 3)).grad_fn).__name__ for rows in (MANY_ROWS - 1, MANY_ROWS)]
    assert names == ["AddmmBackward0", "_OneDNNLinearBackward"]


def test_linear_layer_without_onednn():
    layer, x = LinearLayer(3, 2), torch.ones(MANY_ROWS, 3)
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        assert type(layer(x).grad_fn).__name__ == "AddmmBackward0"
    finally:
        torch._C._set_mkldnn_enabled(before)


def test_frozen_weights_get_no_gradient():
    layer, x = LinearLayer(3, 2).requires_grad_(False), torch.ones(MANY_ROWS, 3, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_last_convolution_reads_channels_last_and_first_alike():
    torch.manual_seed(0)
    conv, x = Conv(4, 5, kernel_size=3), torch.randn(6, 4, 3, 3)
    channels_last = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    torch.testing.assert_close(conv(x), conv(channels_last))
