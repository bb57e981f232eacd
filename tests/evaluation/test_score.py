import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ContractError
from holdfast.evaluation.score import score

FEW = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12)


def alone(*numbers):
    return torch.tensor(numbers)[:, None]


def test_iqm_trims_a_quarter_at_each_end():
    result = score([alone(1000.0, 1.0, 2.0, 3.0, 4.0, 5.0, -1000.0, 0.0)])
    assert result.mean == 15 / 8
    assert result.iqm == (1 + 2 + 3 + 4) / 4
    # Six episodes: one at each end, rounded down.
    assert score([alone(9.0, 1.0, 2.0, 3.0, 4.0, -9.0)]).iqm == 2.5


@pytest.mark.parametrize("number", [0.0, 1.0, -3.5])
def test_interval_of_constant_sample(number):
    result = score([alone(*[number] * 50), alone(*[number] * 50)])
    assert (result.mean, result.iqm) == (number, number)
    assert result.mean_ci95 == result.iqm_ci95 == (number, number)


def test_interval_of_two_episodes():
    # Of four ways to draw them, two are these: each end is one of four, more than 2.5 %.
    assert score([alone(0.0, 1.0)]).mean_ci95 == (0.0, 1.0)


def test_interval_width_matches_standard_error():
    share, count = 0.3, 1000
    result = score([alone(*[1.0] * int(share * count), *[0.0] * int((1 - share) * count))])
    error = math.sqrt(share * (1 - share) / count)
    assert result.mean == pytest.approx(share)
    assert result.mean_ci95[0] == pytest.approx(share - 1.96 * error, abs=0.15 * error)
    assert result.mean_ci95[1] == pytest.approx(share + 1.96 * error, abs=0.15 * error)


def test_bootstrap_is_stratified_by_seed():
    # Drawn from together, these would be anything around a half.
    result = score([alone(0.0, 0.0, 0.0), alone(1.0, 1.0, 1.0)])
    assert result.mean_ci95 == (0.5, 0.5)


def test_bootstrap_resamples_environments():
    numbers = torch.arange(8.0)[:, None]
    # Four who are told the same thing know no more than one.
    assert score([numbers.expand(8, 4)]).mean_ci95 == score([numbers]).mean_ci95
    spread = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert score([spread]).mean_ci95 == (0.5, 0.5)


def test_bootstrap_pools_seeds_with_one_environment():
    result = score([alone(0.0), alone(1.0)])
    assert result.mean_ci95 == (0.0, 1.0)
    # Sides of different size stay apart.
    assert score([torch.zeros(1, 2), torch.ones(1, 1), torch.zeros(1, 2), torch.ones(1, 1)]).mean == 1 / 3


@pytest.mark.parametrize("samples", [[torch.ones(1, 1)], [torch.ones(1, 3)], [torch.ones(1, 3), torch.ones(1, 2)]])
def test_interval_of_one_environment_is_an_error(samples):
    with pytest.raises(ContractError, match="episodes of at least two environments"):
        score(samples)


@settings(max_examples=15)
@given(FEW, FEW)
def test_score_is_deterministic_and_bounded(one, other):
    samples = [alone(*one), alone(*other)]
    state = torch.get_rng_state()
    result = score(samples)
    assert result == score(samples)
    assert torch.equal(torch.get_rng_state(), state)
    for value, (low, high) in ((result.mean, result.mean_ci95), (result.iqm, result.iqm_ci95)):
        assert min(one + other) - 1e-4 <= low <= high <= max(one + other) + 1e-4
        assert min(one + other) - 1e-4 <= value <= max(one + other) + 1e-4
