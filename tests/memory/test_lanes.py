from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.memory import GRU, LSTM
from holdfast.memory.lanes import FEWEST
from holdfast.memory.slots import plan_slots

both = pytest.mark.parametrize("kind", [LSTM, GRU])


def lived(B, T, starts, absent, seed):
    """Where rows start, and where somebody acts."""
    torch.manual_seed(seed)
    return torch.rand(B, T) < starts, torch.rand(B, T) >= absent


def inside(clear):
    return clear[:, 1:].sum(1)


@settings(max_examples=80, deadline=None)
@given(
    B=st.integers(1, 120),
    T=st.integers(1, 70),
    starts=st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    absent=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_what_lies_between_two_starts_is_computed_in_one_go_behind_a_blank(B, T, starts, absent, seed):
    clear, valid = lived(B, T, starts, absent, seed)
    slots = plan_slots(clear, valid, torch.float32)
    steps = (1000 * torch.arange(B)[:, None] + torch.arange(T) + 1).float()[:, :, None]
    laid = slots.spread(steps, slots.drive_SB2)
    assert slots.collect(laid[:, :, :1])[valid].equal(steps[valid])
    assert (slots.collect(laid[:, :, :1])[~valid] == 0).all()
    seen, blank, hold = laid.flatten(0, 1).unbind(-1)
    assert ((seen > 0) + blank + hold == 1).all()
    assert blank.sum() == inside(clear).sum()
    assert slots.lane_B.sort().values.equal(torch.arange(B))
    slot = slots.slot_of.source.view(B, T)
    for row in range(B):
        cuts = [0, *(1 + clear[row, 1:].nonzero().flatten()).tolist(), T]
        for begin, end in pairwise(cuts):
            places = slot[row, begin:end][valid[row, begin:end]].tolist()
            assert places == list(range(*places[:1], B * slots.length, B))[: len(places)]
            assert not places or (places[0] == row if begin == 0 else blank[places[0] - B] == 1)


@pytest.mark.parametrize(("B", "starts"), [(64, 0.1), (256, 0.02), (256, 0.1), (1024, 0.02)])
def test_the_row_with_the_most_starts_does_not_decide_how_long_all_are(B, starts):
    clear, valid = lived(B, 64, starts, 0.0, seed=B)
    slots = plan_slots(clear, valid, torch.float32)
    mean, most = 64 + inside(clear).float().mean(), 64 + int(inside(clear).max())
    assert mean <= slots.length <= mean + 0.4 * (most - mean)


@settings(max_examples=40, deadline=None)
@given(B=st.integers(1, 200), T=st.integers(1, 40), starts=st.floats(0.0, 1.0), seed=st.integers(0, 2**31))
def test_no_lane_is_longer_than_the_longest_row_was(B, T, starts, seed):
    clear, valid = lived(B, T, starts, 0.2, seed)
    slots = plan_slots(clear, valid, torch.float32)
    assert slots.length <= max(1, int((inside(clear) + valid.sum(1)).max()))


def test_few_rows_stay_in_their_lanes():
    clear, valid = lived(FEWEST - 1, 64, 0.1, 0.0, seed=3)
    assert plan_slots(clear, valid, torch.float32).lane_B.equal(torch.arange(FEWEST - 1))


def test_rows_stay_in_their_lanes_where_nothing_is_won():
    clear, valid = lived(FEWEST, 64, 0.0, 0.0, seed=3)
    clear[:, 32] = clear[FEWEST // 2 :, 20] = True
    assert plan_slots(clear, valid, torch.float32).lane_B.equal(torch.arange(FEWEST))


def test_rows_that_start_nowhere_keep_their_lanes():
    clear, valid = lived(256, 64, 0.02, 0.0, seed=4)
    slots, quiet = plan_slots(clear, valid, torch.float32), inside(clear) == 0
    assert slots.lane_B[quiet].equal(torch.arange(256)[quiet])
    assert not slots.lane_B.equal(torch.arange(256))


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_crosses_between_rows_that_share_a_lane(kind, dtype):
    cell, (clear, valid) = kind(32, 32, 2).to(dtype), lived(96, 64, 0.1, 0.1, seed=5)
    x = torch.randn(96, 64, 32, dtype=dtype, requires_grad=True)
    y, _ = cell(x, cell.initial(96), clear, valid)
    for row in (0, 17, 95):
        (pull,) = torch.autograd.grad(y[row].sum(), x, retain_graph=True)
        assert (pull[row] != 0).any()
        assert (pull[torch.arange(96) != row] == 0).all()


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_says_the_same_to_the_last_bit_whatever_its_mates_do(kind, dtype):
    cell, (clear, valid) = kind(32, 32, 2).to(dtype), lived(96, 64, 0.1, 0.0, seed=6)
    other, _ = lived(96, 64, 0.04, 0.0, seed=7)
    x, own = torch.randn(96, 64, 32, dtype=dtype), torch.arange(96) < 3
    changed = torch.where(own[:, None, None], x, torch.randn_like(x))
    with torch.no_grad():
        y, after = cell(x, cell.initial(96), clear, valid)
        z, then = cell(changed, cell.initial(96), torch.where(own[:, None], clear, other), valid)
    assert y[own].equal(z[own])
    assert all(leaf[own].equal(then[key][own]) for key, leaf in after.items())


@both
def test_a_poisoned_row_poisons_nobody_in_its_lane(kind):
    cell, (clear, valid) = kind(16, 16), lived(64, 64, 0.1, 0.0, seed=8)
    x = torch.randn(64, 64, 16)
    was, _ = cell(x, cell.initial(64), clear, valid)
    x[9] = float("nan")
    now, after = cell(x, cell.initial(64), clear, valid)
    others = torch.arange(64) != 9
    torch.testing.assert_close(now[others], was[others])
    assert all(leaf[others].isfinite().all() for leaf in after.values())


def test_gradients_of_gradients_find_their_way_too():
    clear, valid = lived(5, 7, 0.3, 0.3, seed=9)
    slots = plan_slots(clear, valid, torch.float64)
    x = torch.randn(5, 7, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(x):
        return slots.collect(slots.spread(x, slots.drive_SB2)[:, :, :2] ** 3)

    assert torch.autograd.gradcheck(there_and_back, x)
    assert torch.autograd.gradgradcheck(there_and_back, x)
