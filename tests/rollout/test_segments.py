import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rollout.segments import next_values, reverse_scan, shift_left

sizes = {"B": st.integers(1, 4), "T": st.integers(1, 70), "seed": st.integers(0, 10**6)}


def loop_back(add, keep, end):
    """y[t] = add[t] + keep[t] y[t+1], one step after the other."""
    y, outputs = end.clone(), []
    for t in reversed(range(add.shape[1])):
        y = add[:, t] + keep[:, t] * y
        outputs.append(y)
    return torch.stack(outputs[::-1], dim=1)


def plain_worth(values, valid, next_ended, next_cut_value, end_values):
    """What each step is worth to the one before it, one step after the other."""
    worth, outputs = end_values.clone(), []
    for t in reversed(range(values.shape[1])):
        worth = torch.where(next_ended[:, t], next_cut_value[:, t], worth)
        worth = torch.where(valid[:, t], values[:, t], worth)
        outputs.append(worth)
    return torch.stack(outputs[::-1], dim=1)


def random_case(B, T, seed):
    generator = torch.Generator().manual_seed(seed)
    values, cut_values = torch.randn(2, B, T, generator=generator, dtype=torch.float64)
    valid, ended = torch.rand(2, B, T, generator=generator) < torch.tensor([0.4, 0.2])[:, None, None]
    return values, valid, ended, cut_values, torch.randn(B, generator=generator, dtype=torch.float64)


@given(**sizes)
def test_reverse_scan_matches_loop(B, T, seed):
    generator = torch.Generator().manual_seed(seed)
    add, keep = torch.randn(2, B, T, generator=generator, dtype=torch.float64)
    end = torch.randn(B, generator=generator, dtype=torch.float64)
    keep = keep.clamp(-1, 1) * (torch.rand(B, T, generator=generator) < 0.8)
    torch.testing.assert_close(reverse_scan(add, keep, end), loop_back(add, keep, end), rtol=1e-12, atol=1e-12)


def test_reverse_scan_by_hand():
    # y2 = 3 + 0.5 * 8 = 7;  y1 = 2 + 0 * 7 = 2;  y0 = 1 + 10 * 2 = 21
    add = torch.tensor([[1.0, 2.0, 3.0]])
    keep = torch.tensor([[10.0, 0.0, 0.5]])
    assert reverse_scan(add, keep, torch.tensor([8.0])).tolist() == [[21.0, 2.0, 7.0]]


@pytest.mark.parametrize("noise", [float("inf"), float("nan")])
def test_reverse_scan_ignores_nan_behind_zero_keep(noise):
    add, keep = torch.tensor([[1.0, 2.0, noise]]), torch.tensor([[10.0, 0.0, 0.0]])
    assert reverse_scan(add, keep, torch.tensor([noise]))[0, :2].tolist() == [21.0, 2.0]


def test_shift_left_takes_next_step_and_tail():
    x = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert shift_left(x, torch.tensor([7, 8])).tolist() == [[2, 3, 7], [5, 6, 8]]


@given(**sizes)
def test_next_values_match_loop(B, T, seed):
    case = random_case(B, T, seed)
    assert torch.equal(next_values(*case), plain_worth(*case))


@pytest.mark.parametrize(
    ("there", "ended", "worth"),
    [
        ([1, 1, 1], [0, 0, 0], [1, 2, 3]),
        ([1, 0, 1], [0, 0, 0], [1, 3, 3]),  # step 1 passes step 2's value on
        ([1, 0, 0], [0, 0, 0], [1, 8, 8]),  # nobody acts any more: the end value
        ([0, 0, 1], [1, 0, 0], [10, 3, 3]),  # the episode ended after step 0, cut at a worth of 10
        ([1, 0, 0], [0, 0, 1], [1, 30, 30]),  # it ends with the tail
        ([1, 1, 1], [1, 1, 1], [1, 2, 3]),  # who acts is worth its own value, whatever comes
    ],
)
def test_next_values_by_hand(there, ended, worth):
    result = next_values(
        torch.tensor([[1.0, 2.0, 3.0]]),
        torch.tensor([there]).bool(),
        torch.tensor([ended]).bool(),
        torch.tensor([[10.0, 20.0, 30.0]]),
        torch.tensor([8.0]),
    )
    assert result.tolist() == [worth]


@pytest.mark.parametrize("noise", [1e6, float("inf"), float("nan")])
@given(**sizes)
def test_next_values_ignore_invalid_steps(noise, B, T, seed):
    values, valid, ended, cut_values, end = random_case(B, T, seed)
    loud = next_values(torch.where(valid, values, noise), valid, ended, torch.where(ended, cut_values, noise), end)
    assert torch.equal(loud, next_values(values, valid, ended, cut_values, end))
