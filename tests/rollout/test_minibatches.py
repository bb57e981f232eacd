import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.rollout.segments import (
    Segments,
    annealed_beta,
    importance_weights,
    minibatches,
    sample_minibatches,
    segment_priorities,
)

sizes = {"B": st.integers(1, 40), "seed": st.integers(0, 10**6), "epoch": st.integers(0, 10**6)}


def segments_of(B):
    """Segments of which nothing is read but how many there are."""
    empty = TensorDict({}, batch_size=[B])
    return Segments(
        TensorDict({}, batch_size=[B, 1]),
        empty,
        TensorDict({"rewards": torch.zeros(B)}, [B]),
        torch.zeros(B, dtype=torch.long),
    )


def draw(priorities, rows, count, *, seed=0, epoch=0):
    """Draw from rows with these priorities; an integer: from so many without."""
    B = priorities if isinstance(priorities, int) else len(priorities)
    row_priorities = None if isinstance(priorities, int) else priorities
    pairs = list(sample_minibatches(segments_of(B), row_priorities, rows, count, seed=seed, epoch=epoch))
    index = torch.stack([index for index, _ in pairs])
    return index, torch.stack([probabilities for _, probabilities in pairs])


def unlikely(counts, probabilities):
    """Pearson's chi-square; for up to 11 degrees of freedom 35 is passed by chance once in 4000 times."""
    expected = counts.sum() * probabilities
    return float(((counts - expected) ** 2 / expected).sum())


@given(**sizes, rows=st.integers(1, 40))
def test_sequential_minibatches_cover_each_row_once(B, seed, epoch, rows):
    batches = list(minibatches(segments_of(B), rows, seed=seed, epoch=epoch))
    assert sorted(torch.cat(batches).tolist()) == list(range(B))
    assert all(len(index) == rows for index in batches[:-1])


@given(**sizes, part=st.floats(0, 1), count=st.integers(1, 4), alike=st.booleans())
def test_no_row_comes_twice_in_a_minibatch(B, seed, epoch, part, count, alike):
    rows = max(1, int(part * B))
    priorities = B if alike else torch.rand(B, generator=torch.Generator().manual_seed(seed)) ** 8
    index, probabilities = draw(priorities, rows, count, seed=seed, epoch=epoch)
    assert index.shape == probabilities.shape == (count, rows)
    assert all(len(set(each.tolist())) == rows for each in index)
    assert index.min() >= 0
    assert index.max() < B


def test_minibatches_depend_on_seed_and_epoch():
    def indices(**other):
        return draw(1000, 8, 3, **other)[0]

    assert torch.equal(indices(seed=3, epoch=5), indices(seed=3, epoch=5))
    draws = torch.cat([indices(seed=seed, epoch=epoch) for seed in (3, 4) for epoch in (5, 6, 7)])
    assert len({tuple(row) for row in draws.tolist()}) == 18


def test_more_minibatches_begin_with_the_same_ones():
    assert torch.equal(draw(100, 8, 6)[0][:2], draw(100, 8, 2)[0])


def test_first_draws_follow_probabilities():
    for priorities, shares in (
        (5, [0.2, 0.2, 0.2, 0.2, 0.2]),
        (torch.tensor([4.0, 1.0, 0.5, 0.5, 2.0]), [0.5, 0.125, 0.0625, 0.0625, 0.25]),
    ):
        index, _ = draw(priorities, 1, 3000, seed=1)
        assert unlikely(torch.bincount(index[:, 0], minlength=5), torch.tensor(shares)) < 20


def test_rows_without_priority_are_rare():
    index, _ = draw(torch.tensor([1.0, 0.0, 1.0]), 2, 300)
    assert set(index.flatten().tolist()) == {0, 2}


def test_second_draws_are_without_replacement():
    # p(i, j) = p[i] p[j] / (1 - p[i])
    p = torch.tensor([0.5, 0.25, 0.125, 0.125])
    index, _ = draw(p, 2, 3000, seed=2)
    pairs = p[:, None] * p / (1 - p[:, None]) * (1 - torch.eye(4))
    counts = torch.bincount(4 * index[:, 0] + index[:, 1], minlength=16)
    apart = ~torch.eye(4, dtype=torch.bool).flatten()
    assert counts[~apart].sum() == 0
    assert unlikely(counts[apart], pairs.flatten()[apart]) < 35


def test_minibatches_are_independent():
    # What comes second in a row of draws comes as often after any first.
    index, _ = draw(3, 1, 3000, seed=4)
    after = 3 * index[:-1, 0] + index[1:, 0]
    assert unlikely(torch.bincount(after, minlength=9), torch.full((9,), 1 / 9)) < 35


def test_a_uniform_number_of_zero_is_the_last_to_be_drawn(monkeypatch):
    monkeypatch.setattr("holdfast.rng.uniform", lambda *_: torch.tensor([0.5, 0.0, 0.5]))
    index, _ = draw(3, 3, 1)
    assert index[0, -1] == 1


def test_probabilities_by_hand():
    # Priorities 3 and 1 of 4, but for a millionth: 3/4 and 1/4.
    index, probabilities = draw(torch.tensor([3.0, 1.0]), 2, 5)
    expected = torch.tensor([0.75, 0.25])[index]
    torch.testing.assert_close(probabilities, expected, rtol=1e-6, atol=0)


def test_without_priorities_all_rows_are_as_probable():
    for priorities in (7, torch.zeros(7), torch.full((7,), 3.0)):
        _, probabilities = draw(priorities, 7, 2)
        torch.testing.assert_close(probabilities, torch.full((2, 7), 1 / 7))


def test_more_rows_than_there_are_cannot_be_drawn():
    with pytest.raises(ContractError, match="5 rows cannot be drawn from 4"):
        draw(4, 5, 1)


def test_priorities_by_hand():
    # 1 + 3 = 4, its root 2; the second row's 100 is nobody's; a row of nobody has none.
    advantages = torch.tensor([[1.0, -3.0], [100.0, 9.0], [7.0, 7.0]])
    valid = torch.tensor([[True, True], [False, True], [False, False]])
    assert segment_priorities(advantages, valid, 0.5).tolist() == [2.0, 3.0, 0.0]
    assert segment_priorities(advantages, valid, 1.0).tolist() == [4.0, 9.0, 0.0]


def test_alpha_zero_gives_uniform_priorities():
    advantages = torch.tensor([[1.0, -3.0], [0.0, 0.0], [float("nan"), 1.0]])
    priorities = segment_priorities(advantages, torch.ones(3, 2, dtype=torch.bool), 0.0)
    assert priorities.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("noise", [float("nan"), float("inf"), -float("inf")])
def test_rows_that_are_not_finite_have_no_priority_and_spoil_no_other(noise):
    advantages = torch.tensor([[1.0, noise], [2.0, noise]])
    valid = torch.tensor([[True, True], [True, False]])
    assert segment_priorities(advantages, valid, 1.0).tolist() == [0.0, 2.0]


def test_importance_weights_by_hand():
    # Four rows; 1/2 is twice as often as by chance, 1/16 a quarter as often.
    p = torch.tensor([0.5, 0.25, 0.0625])
    assert importance_weights(p, 4, 1.0).tolist() == [0.5, 1.0, 4.0]
    assert importance_weights(p, 4, 0.5).tolist() == pytest.approx([0.5**0.5, 1.0, 2.0])
    assert importance_weights(p, 4, 0.0).tolist() == [1.0, 1.0, 1.0]


@given(**sizes)
def test_importance_weights_average_to_one_when_beta_is_one(B, seed, epoch):
    # E[1 / (N p)] = sum p / (N p) = 1
    priorities = torch.rand(B, generator=torch.Generator().manual_seed(seed))
    _, probabilities = draw(priorities, B, 1, seed=seed, epoch=epoch)
    assert probabilities.sum().item() == pytest.approx(1.0, rel=1e-5)
    weighed = probabilities[0] * importance_weights(probabilities[0], B, 1.0)
    assert weighed.sum().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize(("progress", "beta"), [(0.0, 0.6), (0.5, 0.8), (1.0, 1.0)])
def test_beta_anneals_to_one(progress, beta):
    assert annealed_beta(0.6, progress) == pytest.approx(beta)
