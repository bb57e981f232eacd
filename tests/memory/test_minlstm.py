"""MinLSTM: the parallel scan, and the recurrence it computes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.memory import MinLSTM
from holdfast.memory.scan import scan


def test_scan_clears_exactly_with_tiny_factors():
    a, b = torch.full((2, 64, 3), 1e-30), torch.randn(2, 64, 3)
    a[:, 40] = 0.0
    one = scan(a, b, torch.randn(2, 3))
    b2 = torch.cat([1e30 * torch.randn(2, 40, 3), b[:, 40:]], 1)
    assert scan(a, b2, torch.zeros(2, 3))[:, 40:].equal(one[:, 40:])


@settings(max_examples=30, deadline=None)
@given(T=st.integers(1, 130), seed=st.integers(0, 999))
def test_scan_equals_the_loop(T, seed):
    torch.manual_seed(seed)
    a, b, h = (
        torch.rand(3, T, 2, dtype=torch.float64),
        torch.randn(3, T, 2, dtype=torch.float64),
        torch.randn(3, 2),
    )
    h, loop = h.double(), []
    result = scan(a, b, h)
    for t in range(T):
        h = a[:, t] * h + b[:, t]
        loop.append(h)
    torch.testing.assert_close(result, torch.stack(loop, 1), atol=1e-12, rtol=0)


def make_cell(num_layers=1):
    torch.manual_seed(0)
    return MinLSTM(3, 4, num_layers).double()


def test_one_step_equals_the_formula():
    cell, x = make_cell(), torch.randn(2, 3, dtype=torch.float64)
    state = cell.initial(2).apply(torch.randn_like)
    y, after = cell(x, state, torch.tensor([False, True]))
    f, i, candidate = cell.gates[0](x).chunk(3, dim=-1)
    f, i = torch.sigmoid(f), torch.sigmoid(i)
    h = torch.stack([state["h"][0, 0], torch.zeros(4)])
    expected = f / (f + i) * h + i / (f + i) * candidate
    # A clear sets the decay to 0, not the weight of the candidate.
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=0)
    assert after["h"][:, 0].equal(y.detach())


def test_recurrence_is_the_identity_at_invalid_steps_and_zero_at_clears():
    cell, x = make_cell(), torch.randn(1, 3, 3, dtype=torch.float64)
    clear = torch.tensor([[False, True, False]])
    a, b = cell.recurrence(0, x, clear, torch.tensor([[True, True, False]]))
    assert (a[0, 0] > 0).all()
    assert (a[0, 0] < 1).all()
    assert (a[0, 1] == 0).all()
    assert (a[0, 2] == 1).all()
    assert (b[0, 2] == 0).all()


def test_forget_gate_bias_is_one_and_the_others_zero():
    for gates in make_cell(num_layers=2).gates:
        assert gates.bias.tolist() == [1.0] * 4 + [0.0] * 8


def test_saturated_gates_give_no_nan():
    cell = make_cell()
    with torch.no_grad():
        cell.gates[0].bias[:8] = -1e4
    y, _ = cell(torch.randn(2, 5, 3).double(), cell.initial(2), torch.zeros(2, 5, dtype=torch.bool))
    assert y.isfinite().all()
    assert y.abs().sum() > 0
