"""The LSTM kernel against torch's LSTM cell and autograd; test_ops.py has the operators."""

import pytest
import torch

from helpers import triton_interpreter
from holdfast.memory.kernels import lstm, ops
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
    """Return the gates' inputs, recurrent weights, h, c and codes, of which some clear or are invalid."""
    torch.manual_seed(0)
    x, w = torch.randn(B, T, 4 * H), torch.randn(4 * H, H) / H**0.5
    code = torch.zeros(B, T, dtype=torch.uint8)
    code[1, 2], code[2, 1], code[2, 3] = CLEAR, INVALID, CLEAR | INVALID
    return [tensor.to(DEVICE) for tensor in (x, w, torch.randn(B, H), torch.randn(B, H), code)]


def forward(x, w, h, c, code, keep, plan):
    return ops.run_forward(lstm, (x, w), (h, c), code, keep, "tf32x3", plan)


def forward_by_hand(x, w, h, c, code):
    """Return y, h, c, and by step the state before it, the cell after it, and the gates."""
    outputs, saved = [], []
    for t in range(T):
        clear, valid = (code[:, t, None] & CLEAR) != 0, (code[:, t, None] & INVALID) == 0
        h, c = torch.where(clear, 0.0, h), torch.where(clear, 0.0, c)
        i, f, g, o = (x[:, t] + h @ w.T).chunk(4, dim=1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c_new = f * c + i * g
        h_new = o * c_new.tanh()
        before, h, c = h, torch.where(valid, h_new, h), torch.where(valid, c_new, c)
        outputs.append(torch.where(valid, h_new, 0.0))
        saved.append((before, c, torch.cat([i, f, g, o], dim=1)))
    return torch.stack(outputs, 1), h, c, *(torch.stack(tensors, 1) for tensors in zip(*saved, strict=True))


@every_plan
def test_forward_equals_torch_lstm_cell(plan):
    x, w, h, c, code = inputs_of()
    cell = torch.nn.LSTMCell(4 * H, H, bias=False).to(DEVICE)
    with torch.no_grad():
        cell.weight_ih.copy_(torch.eye(4 * H))
        cell.weight_hh.copy_(w)
        y, h_after, c_after, *_ = forward(x, w, h, c, torch.zeros_like(code), keep=False, plan=plan)
        for t in range(T):
            h, c = cell(x[:, t], (h, c))
            torch.testing.assert_close(y[:, t], h, atol=1e-5, rtol=0)
    torch.testing.assert_close((h_after, c_after), (h, c), atol=1e-5, rtol=0)


@every_plan
def test_clears_and_invalid_steps_and_saved_tensors(plan):
    inputs = inputs_of()
    outputs = forward(*inputs, keep=True, plan=plan)
    expected = forward_by_hand(*inputs)
    for actual, truth in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, truth, atol=1e-5, rtol=0)
    assert (outputs[0][2, [1, 3]] == 0).all()
    assert (outputs[3][1, 2] == 0).all()


@every_plan
def test_backward_equals_autograd(plan):
    x, w, h, c, code = inputs_of()
    for tensor in (x, h, c):
        tensor.requires_grad_()
    y, h_after, c_after, _, cells, gates = forward_by_hand(x, w, h, c, code)
    grads = [torch.randn_like(tensor) for tensor in (y, h_after, c_after)]
    expected = torch.autograd.grad((y, h_after, c_after), (x, h, c), grads)
    c, cells, gates = c.detach(), cells.detach(), gates.detach()
    dy, *last = grads
    actual = ops.run_backward(lstm, (w, c, code, cells), gates, c, dy, last, True, "tf32x3", plan)
    for gradient, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(gradient, truth, atol=1e-5, rtol=0)
    assert (actual[0][2, 1] == 0).all()
