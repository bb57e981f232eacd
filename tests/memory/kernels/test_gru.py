"""The GRU kernel against torch's GRU cell and autograd; test_ops.py has the operators."""

import pytest
import torch

from helpers import triton_interpreter
from holdfast.memory.kernels import gru, ops
from holdfast.memory.kernels.autotune import LaunchPlan
from holdfast.torch_versions import matmul_precision

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLANS = {
    "unsplit": LaunchPlan(16, 128, 4),
    "split": LaunchPlan(16, 16, 4, chunk=16),
    "streamed": LaunchPlan(16, 16, 4, chunk=16, stages=2),
}
B, T, H = 3, 4, 32
CLEAR, INVALID = 1, 2
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)

triton_interpreter.repair()


@pytest.fixture(autouse=True)
def full_float32():
    """No tf32."""
    with matmul_precision(tf32=False):
        yield


def inputs_of():
    """Return the gates' inputs, recurrent weights, the candidate's recurrent bias, h and codes."""
    torch.manual_seed(0)
    x, w = torch.randn(B, T, 3 * H), torch.randn(3 * H, H) / H**0.5
    code = torch.zeros(B, T, dtype=torch.uint8)
    code[1, 2], code[2, 1], code[2, 3] = CLEAR, INVALID, CLEAR | INVALID
    return [tensor.to(DEVICE) for tensor in (x, w, torch.randn(H), torch.randn(B, H), code)]


def forward(x, w, bias, h, code, keep, plan):
    return ops.run_forward(gru, (x, w, bias), (h,), code, keep, "tf32x3", plan)


def forward_by_hand(x, w, bias, h, code):
    """Return y, h, and by step the state before it and r, z, n, n_h."""
    outputs, saved = [], []
    for t in range(T):
        clear, valid = (code[:, t, None] & CLEAR) != 0, (code[:, t, None] & INVALID) == 0
        h = torch.where(clear, 0.0, h)
        (x_r, x_z, x_n), (h_r, h_z, n_h) = x[:, t].chunk(3, dim=1), (h @ w.T).chunk(3, dim=1)
        r, z, n_h = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid(), n_h + bias
        n = (x_n + r * n_h).tanh()
        h_new = (1 - z) * n + z * h
        before, h = h, torch.where(valid, h_new, h)
        outputs.append(torch.where(valid, h_new, 0.0))
        saved.append((before, torch.cat([r, z, n, n_h], dim=1)))
    return torch.stack(outputs, 1), h, *(torch.stack(tensors, 1) for tensors in zip(*saved, strict=True))


@every_plan
def test_forward_equals_torch_gru_cell(plan):
    x, w, bias, h, code = inputs_of()
    cell = torch.nn.GRUCell(3 * H, H).to(DEVICE)
    with torch.no_grad():
        cell.weight_ih.copy_(torch.eye(3 * H))
        cell.weight_hh.copy_(w)
        cell.bias_ih.zero_()
        cell.bias_hh.copy_(torch.cat([torch.zeros(2 * H, device=DEVICE), bias]))
        y, h_after, *_ = forward(x, w, bias, h, torch.zeros_like(code), keep=False, plan=plan)
        for t in range(T):
            h = cell(x[:, t], h)
            torch.testing.assert_close(y[:, t], h, atol=1e-5, rtol=0)
    torch.testing.assert_close(h_after, h, atol=1e-5, rtol=0)


@every_plan
def test_clears_and_invalid_steps_and_saved_tensors(plan):
    inputs = inputs_of()
    outputs = forward(*inputs, keep=True, plan=plan)
    for actual, truth in zip(outputs, forward_by_hand(*inputs), strict=True):
        torch.testing.assert_close(actual, truth, atol=1e-5, rtol=0)
    assert (outputs[0][2, [1, 3]] == 0).all()
    assert (outputs[2][1, 2] == 0).all()


@every_plan
def test_backward_equals_autograd(plan):
    x, w, bias, h, code = inputs_of()
    for tensor in (x, h, bias):
        tensor.requires_grad_()
    y, h_after, h_prev, gates = forward_by_hand(x, w, bias, h, code)
    grads = [torch.randn_like(tensor) for tensor in (y, h_after)]
    dx, dh, dbias = torch.autograd.grad((y, h_after), (x, h, bias), grads)
    h, h_prev, gates = h.detach(), h_prev.detach(), gates.detach()
    dy, *last = grads
    dgates, dh_in = ops.run_backward(gru, (w, code, h_prev), gates, h, dy, last, True, "tf32x3", plan)
    # In the order n_h, r, z, n.
    torch.testing.assert_close(dgates[..., H:], dx, atol=1e-5, rtol=0)
    torch.testing.assert_close(dgates[..., :H].sum((0, 1)), dbias, atol=1e-5, rtol=0)
    torch.testing.assert_close(dh_in, dh, atol=1e-5, rtol=0)
    assert (dgates[2, 1] == 0).all()
