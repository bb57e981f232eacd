import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import holdfast
from holdfast.learn.optimizers import clip_weights, describe, initial_bounds, weight_metrics

MEASURES = {
    "norm",
    "largest_sv",
    "mean_sv",
    "sv_ratio",
    "collapsed",
    "effective_rank",
    "loglog_slope",
    "loglog_r2",
}


class Holding(nn.Module):
    """A policy of one layer whose weight is given."""

    def __init__(self, weight):
        super().__init__()
        self.layer = nn.Module()
        self.layer.weight = nn.Parameter(torch.as_tensor(weight))
        self.layer.bias = nn.Parameter(torch.full((3,), 9.0))


def measured(weight):
    metrics = weight_metrics(Holding(weight))
    assert {name.partition("@")[2] for name in metrics} == {"layer.weight"}
    plain = {name.partition("@")[0].removeprefix("weights/"): number for name, number in metrics.items()}
    assert set(plain) == MEASURES
    return plain


def turned(singular_values, rows, columns, seed=0):
    """A matrix with these singular values and any directions."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(n, n, generator=generator)).Q for n in (rows, columns))
    middle = torch.zeros(rows, columns)
    middle.diagonal()[:] = torch.tensor(singular_values)
    return left @ middle @ right


def test_singular_values_within_rounding_of_zero_are_left_out():
    # Three values: below 3 x 1.2e-7 of the largest.
    assert measured(torch.diag(torch.tensor([1.0, 0.5, 1e-7])))["sv_ratio"] == pytest.approx(2.0)


def test_power_law_is_fitted_in_double_precision():
    powers = torch.arange(1, 9, dtype=torch.float64) ** -2
    fit = describe(powers)
    assert fit["loglog_slope"] == pytest.approx(-2, rel=1e-12)
    assert fit["loglog_r2"] == pytest.approx(1, rel=1e-12)


def test_a_diagonal_matrix_by_hand():
    # Singular values 4 3 0.04: squares 16 + 9 + 0.0016; sum 7.04, of which 4 + 3 are 99.4 %, 4 are 57 %.
    metrics = measured(torch.diag(torch.tensor([3.0, 0.04, -4.0])))
    assert metrics["norm"] == pytest.approx(math.sqrt(25.0016), rel=1e-6)
    assert metrics["largest_sv"] == pytest.approx(4.0, rel=1e-6)
    assert metrics["mean_sv"] == pytest.approx(7.04 / 3, rel=1e-6)
    assert metrics["sv_ratio"] == pytest.approx(100.0, rel=1e-5)
    assert metrics["effective_rank"] == 2.0
    assert measured(torch.diag(torch.tensor([3.0, 0.03, 4.0])))["collapsed"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_identity_has_all_its_rank_and_no_slope(size):
    metrics = measured(torch.eye(size))
    assert metrics["norm"] == pytest.approx(math.sqrt(size))
    assert [metrics[name] for name in ("largest_sv", "mean_sv", "sv_ratio")] == [1.0, 1.0, 1.0]
    assert [metrics[name] for name in ("collapsed", "loglog_slope", "loglog_r2")] == [0.0, 0.0, 0.0]
    # 99 of 100 make 99 % of the sum.
    assert metrics["effective_rank"] == min(size, 99)


def test_a_matrix_of_rank_one_has_collapsed_but_for_one_direction():
    # (1 2) x (3 4 5 6): one singular value, |(1 2)| |(3 4 5 6)|; the other is rounding, and not counted.
    metrics = measured(torch.outer(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0, 6.0])))
    size = math.sqrt(5 * 86)
    assert metrics["norm"] == pytest.approx(size, rel=1e-6)
    assert metrics["largest_sv"] == pytest.approx(size, rel=1e-6)
    assert metrics["mean_sv"] == pytest.approx(size / 2, rel=1e-6)
    assert [metrics[name] for name in ("sv_ratio", "collapsed", "effective_rank")] == [1.0, 0.5, 1.0]
    assert [metrics[name] for name in ("loglog_slope", "loglog_r2")] == [0.0, 0.0]


def test_a_matrix_of_zeros_has_no_rank():
    metrics = measured(torch.zeros(3, 2))
    assert metrics.pop("collapsed") == 1.0
    assert set(metrics.values()) == {0.0}


@given(power=st.floats(0.2, 2), rows=st.integers(2, 8), columns=st.integers(2, 8), seed=st.integers(0, 100))
def test_singular_values_along_a_power_of_the_rank_lie_on_its_line(power, rows, columns, seed):
    values = [rank**-power for rank in range(1, min(rows, columns) + 1)]
    metrics = measured(turned(values, rows, columns, seed))
    assert metrics["loglog_slope"] == pytest.approx(-power, rel=1e-3)
    assert metrics["loglog_r2"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["sv_ratio"] == pytest.approx(1 / values[-1], rel=1e-3)


def test_a_line_that_does_not_fit_explains_less_by_hand():
    # log s = 1 1 0 over log rank 0, log 2, log 3.
    x, y = [0, math.log(2), math.log(3)], [1, 1, 0]
    x = [each - sum(x) / 3 for each in x]
    y = [each - sum(y) / 3 for each in y]
    slope = sum(a * b for a, b in zip(x, y, strict=True)) / sum(a * a for a in x)
    rest = sum((b - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    metrics = measured(torch.diag(torch.tensor([math.e, 1.0, math.e])))
    assert metrics["loglog_slope"] == pytest.approx(slope, rel=1e-5)
    assert metrics["loglog_r2"] == pytest.approx(1 - rest / sum(b * b for b in y), rel=1e-5)
    assert 0.2 < metrics["loglog_r2"] < 0.8


def test_more_than_two_axes_are_outputs_and_the_rest():
    flat = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    assert measured(flat.reshape(4, 3, 2, 2)) == measured(flat)
    # A bilinear form with one output.
    assert measured(flat[None]) == measured(flat)
    assert measured(flat[:1].reshape(1, 3, 2, 2))["effective_rank"] == 1.0


def test_every_matrix_of_a_policy_is_described_by_its_name():
    policy = holdfast.make_policy("fast", holdfast.make_world("arena", agents=24), seed=0)
    metrics = weight_metrics(policy)
    matrices = {name for name, weight in policy.named_parameters() if weight.dim() >= 2}
    assert set(metrics) == {f"weights/{measure}@{name}" for measure in MEASURES for name in matrices}
    assert {"lstm.cell.rnn.weight_hh_l0", "encoder.conv1.weight"} <= matrices
    assert all(math.isfinite(number) for number in metrics.values())
    # The bilinear form is a matrix, not one long row.
    assert metrics["weights/effective_rank@actor.scores.weight"] > 2


def test_bounds_are_the_largest_entries_of_matrices():
    assert initial_bounds(Holding([[1.0, -3.0], [2.0, 0.5]])) == {"layer.weight": 3.0}
    assert initial_bounds(Holding(torch.zeros(2, 2))) == {}


def test_weight_clipping_spares_biases():
    # Largest at first 3: within 2 x 3 nothing changes, beyond it is cut.
    policy = Holding([[1.0, -3.0], [2.0, 0.5]])
    bounds = initial_bounds(policy)
    with torch.no_grad():
        policy.layer.weight.mul_(4)
        policy.layer.bias.mul_(4)
    weight = policy.layer.weight
    clip_weights(policy, bounds, 2.0)
    assert policy.layer.weight is weight
    assert weight.tolist() == [[4.0, -6.0], [6.0, 2.0]]
    assert policy.layer.bias.tolist() == [36.0] * 3


def test_a_clip_range_of_zero_is_off():
    policy = Holding([[1.0, -3.0], [2.0, 0.5]])
    clip_weights(policy, {"layer.weight": 0.1}, 0.0)
    assert policy.layer.weight.tolist() == [[1.0, -3.0], [2.0, 0.5]]


def test_weights_at_their_first_size_are_not_changed_by_a_clip_range_of_one():
    policy = holdfast.make_policy("fast", holdfast.make_world("recall", agents=4), seed=0)
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    clip_weights(policy, initial_bounds(policy), 1.0)
    assert all(torch.equal(before[name], weight) for name, weight in policy.state_dict().items())
