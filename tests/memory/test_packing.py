from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.memory import GRU, LSTM
from holdfast.memory.packing import MIN_ROWS, plan_packing

lstm_and_gru = pytest.mark.parametrize("kind", [LSTM, GRU])
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_flags(B, T, starts, invalid, seed):
    """Random clears and valid steps."""
    torch.manual_seed(seed)
    return torch.rand(B, T) < starts, torch.rand(B, T) >= invalid


def resets_per_row(clear):
    return clear[:, 1:].sum(1)


@settings(max_examples=80, deadline=None)
@given(
    B=st.integers(1, 120),
    T=st.integers(1, 70),
    starts=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    invalid=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_episodes_are_contiguous_behind_a_reset_slot(B, T, starts, invalid, seed):
    clear, valid = random_flags(B, T, starts, invalid, seed)
    plan = plan_packing(clear, valid, torch.float32)
    steps = (1000 * torch.arange(B)[:, None] + torch.arange(T) + 1).float()[:, :, None]
    packed = plan.pack(steps, plan.flags_SB3)
    assert plan.unpack(packed[:, :, :1])[valid].equal(steps[valid])
    assert (plan.unpack(packed[:, :, :1])[~valid] == 0).all()
    step, reset, padding, is_step = packed.flatten(0, 1).unbind(-1)
    assert is_step.bool().equal(step > 0)
    assert ((step > 0) + reset + padding == 1).all()
    assert reset.sum() == resets_per_row(clear).sum()
    assert plan.row_B.sort().values.equal(torch.arange(B))
    slot = plan.slot_of.source.view(B, T)
    for row in range(B):
        cuts = [0, *(1 + clear[row, 1:].nonzero().flatten()).tolist(), T]
        for begin, end in pairwise(cuts):
            places = slot[row, begin:end][valid[row, begin:end]].tolist()
            assert places == list(range(*places[:1], B * plan.length, B))[: len(places)]
            assert not places or (places[0] == row if begin == 0 else reset[places[0] - B] == 1)


@pytest.mark.parametrize(("B", "starts"), [(64, 0.1), (256, 0.02), (256, 0.1), (1024, 0.02)])
def test_balancing_shortens_the_longest_row(B, starts):
    clear, valid = random_flags(B, 64, starts, 0.0, seed=B)
    plan = plan_packing(clear, valid, torch.float32)
    mean, most = 64 + resets_per_row(clear).float().mean(), 64 + int(resets_per_row(clear).max())
    assert mean <= plan.length <= mean + 0.4 * (most - mean)


@settings(max_examples=40, deadline=None)
@given(B=st.integers(1, 200), T=st.integers(1, 40), starts=st.floats(0.0, 1.0), seed=st.integers(0, 2**31))
def test_no_packed_row_exceeds_the_longest_row(B, T, starts, seed):
    clear, valid = random_flags(B, T, starts, 0.2, seed)
    plan = plan_packing(clear, valid, torch.float32)
    assert plan.length <= max(1, int((resets_per_row(clear) + valid.sum(1)).max()))


def test_few_rows_are_not_moved():
    clear, valid = random_flags(MIN_ROWS - 1, 64, 0.1, 0.0, seed=3)
    assert plan_packing(clear, valid, torch.float32).row_B.equal(torch.arange(MIN_ROWS - 1))


def test_rows_are_not_moved_without_a_gain():
    clear, valid = random_flags(MIN_ROWS, 64, 0.0, 0.0, seed=3)
    clear[:, 32] = clear[MIN_ROWS // 2 :, 20] = True
    assert plan_packing(clear, valid, torch.float32).row_B.equal(torch.arange(MIN_ROWS))


def test_rows_without_resets_are_not_moved():
    clear, valid = random_flags(256, 64, 0.02, 0.0, seed=4)
    plan, quiet = plan_packing(clear, valid, torch.float32), resets_per_row(clear) == 0
    assert plan.row_B[quiet].equal(torch.arange(256)[quiet])
    assert not plan.row_B.equal(torch.arange(256))


@lstm_and_gru
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_gradient_between_rows_packed_together(kind, dtype):
    cell, (clear, valid) = kind(32, 32, 2).to(dtype), random_flags(96, 64, 0.1, 0.1, seed=5)
    x = torch.randn(96, 64, 32, dtype=dtype, requires_grad=True)
    y, _ = cell(x, cell.initial(96), clear, valid)
    for row in (0, 17, 95):
        (grad,) = torch.autograd.grad(y[row].sum(), x, retain_graph=True)
        assert (grad[row] != 0).any()
        assert (grad[torch.arange(96) != row] == 0).all()


@lstm_and_gru
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_is_bitwise_independent_of_other_rows(kind, dtype):
    cell, (clear, valid) = kind(32, 32, 2).to(dtype), random_flags(96, 64, 0.1, 0.0, seed=6)
    other, _ = random_flags(96, 64, 0.04, 0.0, seed=7)
    x, same_rows = torch.randn(96, 64, 32, dtype=dtype), torch.arange(96) < 3
    changed = torch.where(same_rows[:, None, None], x, torch.randn_like(x))
    with torch.no_grad():
        y, after = cell(x, cell.initial(96), clear, valid)
        z, then = cell(changed, cell.initial(96), torch.where(same_rows[:, None], clear, other), valid)
    assert y[same_rows].equal(z[same_rows])
    assert all(leaf[same_rows].equal(then[key][same_rows]) for key, leaf in after.items())


@lstm_and_gru
def test_nan_does_not_spread_to_rows_packed_together(kind):
    cell, (clear, valid) = kind(16, 16), random_flags(64, 64, 0.1, 0.0, seed=8)
    x = torch.randn(64, 64, 16)
    expected, _ = cell(x, cell.initial(64), clear, valid)
    x[9] = float("nan")
    actual, after = cell(x, cell.initial(64), clear, valid)
    other_rows = torch.arange(64) != 9
    torch.testing.assert_close(actual[other_rows], expected[other_rows])
    assert all(leaf[other_rows].isfinite().all() for leaf in after.values())


def test_packing_passes_gradgradcheck():
    clear, valid = random_flags(5, 7, 0.3, 0.3, seed=9)
    plan = plan_packing(clear, valid, torch.float64)
    x = torch.randn(5, 7, 2, dtype=torch.float64, requires_grad=True)

    def pack_and_unpack(x):
        return plan.unpack(plan.pack(x, plan.flags_SB3)[:, :, :2] ** 3)

    assert torch.autograd.gradcheck(pack_and_unpack, x)
    assert torch.autograd.gradgradcheck(pack_and_unpack, x)
