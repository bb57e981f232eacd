"""Boxes, convolutions as one product, and last layers in full precision: GPU paths against the plain ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from helpers import triton_interpreter
from holdfast import kernel_support
from holdfast.policies import heads
from holdfast.policies.distributions import Categorical
from holdfast.policies.encoders import Conv, TokensToBox, round_up
from holdfast.worlds.step import Feature
from holdfast.worlds.tokens import GLOBAL

triton_interpreter.repair()
CPU = torch.device("cpu")


def tokens(rows, M, channels, seed):
    """Random tokens, several on one cell, some global, unknown or outside of the window."""
    generator = torch.Generator().manual_seed(seed)
    obs = torch.randint(0, 256, (rows, M, 3), generator=generator, dtype=torch.uint8)
    obs[:, :, 1] %= channels + 2
    obs[:, ::3, 0] = 0x23
    obs[:, ::5, 0] = GLOBAL
    return obs


@pytest.mark.skipif(kernel_support.refused_on(CPU) is not None, reason="Triton cannot run here")
@settings(max_examples=10)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(3, 15), st.integers(3, 13), st.integers(0, 99))
def test_kernel_fills_the_same_boxes(channels, M, rows, columns, seed):
    from holdfast.policies.box_kernel import BoxShape, fill_boxes

    box = TokensToBox([Feature(f"f{n}", 3.3 * (n + 1)) for n in range(channels)], (rows, columns))
    obs = tokens(3, M, channels, seed)
    size = channels * box.rows * box.columns
    shape = BoxShape(channels, box.rows, box.columns, (rows, columns))
    filled = fill_boxes(obs, box.normalization, shape, round_up(size), torch.float32)
    assert torch.equal(filled[:, :size].reshape(3, channels, box.rows, box.columns), box(obs))
    assert not filled[:, size:].any()


@pytest.mark.gpu
def test_boxes_on_a_gpu_are_those_of_the_cpu():
    box = TokensToBox([Feature("a", 3.0), Feature("b", 7.0)], (11, 11))
    obs = tokens(500, 200, 2, 0)
    assert torch.equal(box.cuda()(obs.cuda()).cpu(), box.cpu()(obs))


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_convolution_as_one_product(channels, out, kernel, stride, is_padded):
    layer, sides = Conv(channels, out, kernel, stride), (5, 6)
    size = channels * 30
    rows = torch.randn(4, round_up(size) if is_padded else size)
    images = rows[:, :size].unflatten(1, (channels, *sides))
    expected = functional.conv2d(images, layer.weight, layer.bias, stride)
    product = layer._as_product(images)
    assert torch.allclose(product, expected, atol=1e-5)
    grads = [torch.autograd.grad(y.square().sum(), [layer.weight, layer.bias]) for y in (product, expected)]
    for grad, wanted in zip(*grads, strict=True):
        assert torch.allclose(grad, wanted, rtol=1e-4, atol=1e-4)


@settings(max_examples=20)
@given(st.integers(1, 20), st.integers(1, 9), st.sampled_from([16, 300]), st.booleans())
def test_last_layer_from_16_bits_is_exact(rows, outputs, inputs, has_bias):
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(heads, "mixed_product", lambda a, b: a.float() @ b.float())
        x = torch.randn(rows, inputs).bfloat16().requires_grad_()
        weights = [torch.randn(outputs, inputs, requires_grad=True)]
        weights += [torch.randn(outputs, requires_grad=True)] if has_bias else []
        y = heads._ExactLinear.apply(x, weights[0], weights[1] if has_bias else None)
        exact = functional.linear(x.double(), *(weight.double() for weight in weights))
        assert (y - exact).abs().max() <= 1e-6 * exact.abs().max().clamp(min=1)
        grad = torch.randn(rows, outputs)
        grads = torch.autograd.grad(y, [x, *weights], grad)
        wanted = torch.autograd.grad(exact, [x, *weights], grad.double())
        for one, other, digits in zip(grads, wanted, (8e-3, 1e-4, 1e-6), strict=False):
            assert (one - other).abs().max() <= digits * other.abs().max().clamp(min=1e-3)


@pytest.mark.skipif(kernel_support.refused_on(CPU) is not None, reason="Triton cannot run here")
@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 99))
def test_kernel_samples_the_same_actions(rows, count, seed):
    from holdfast.policies.sample_kernel import sample_actions

    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, count, generator=generator)
    logits[:, ::3] = -1e9
    draws = torch.rand(rows, 4, generator=generator)
    draws[0] = 1 - 2.0**-24
    actions = Categorical(count)
    params, action, log_prob = sample_actions(logits, draws[:, 1])
    assert torch.allclose(params, actions.parameters(logits), atol=1e-5)
    wanted = actions.sample(params, draws[:, 1])
    # Where the draw is within rounding of an edge, the sums of probabilities may differ.
    assert (action != wanted).float().mean() <= 0.2
    assert bool(((action >= 0) & (action < count)).all())
    assert torch.equal(log_prob, actions.log_prob(params, action))
    assert bool((log_prob > -1e8).all())


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 5, 8, 33, 256])
def test_kernel_samples_possible_actions_only(count):
    """Sums of probabilities in parallel may fall from one action to the next, and the largest draws meet the total."""
    from holdfast.policies.sample_kernel import sample_actions

    logits = 4 * torch.randn(1 << 18, count, device="cuda")
    logits[:, 1::3] = -1e9
    draws = 1 - torch.randint(1, 5, (1 << 18,), device="cuda") * 2.0**-24
    for each in (draws, torch.rand(1 << 18, device="cuda")):
        _, action, log_prob = sample_actions(logits, each)
        assert 0 <= int(action.min()) <= int(action.max()) < count
        assert float(log_prob.min()) > -1e8
