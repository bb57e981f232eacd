import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from holdfast.learn import losses
from holdfast.learn.advantage import Targets

ALL_VALID = torch.ones(1, 3, dtype=torch.bool)


def near(x, y):
    torch.testing.assert_close(torch.as_tensor(x), torch.as_tensor(y, dtype=torch.as_tensor(x).dtype))


def numbers(*row):
    return torch.tensor([row], dtype=torch.float64)


def mask(*row):
    return torch.tensor([row], dtype=torch.bool)


def random_case(B, T, seed):
    generator = torch.Generator().manual_seed(seed)
    case = [torch.randn(B, T, generator=generator, dtype=torch.float64) for _ in range(4)]
    return case, torch.rand(B, T, generator=generator) < 0.6


LOSSES = {
    "mean_over": lambda a, b, c, d, valid: losses.masked_mean(a, valid),
    "policy_loss": lambda a, b, c, d, valid: losses.policy_loss(a, b, valid, 0.2),
    "value_loss": lambda a, b, c, d, valid: losses.value_loss(a, b, c, valid, None),
    "clipped value_loss": lambda a, b, c, d, valid: losses.value_loss(a, b, c, valid, 0.1),
    "approximate_kl": lambda a, b, c, d, valid: losses.approximate_kl(a, valid),
    "clip_fraction": lambda a, b, c, d, valid: losses.clip_fraction(a, valid, 0.2),
    "explained_variance": lambda a, b, c, d, valid: losses.explained_variance(a, b, valid),
}
cases = {"B": st.integers(1, 4), "T": st.integers(1, 6), "seed": st.integers(0, 10**6)}


@pytest.mark.parametrize("name", LOSSES)
@given(**cases)
def test_masked_mean_counts_valid_steps(name, B, T, seed):
    case, valid = random_case(B, T, seed)
    valid[0, 0] = True
    full = LOSSES[name](*case, valid)
    picked = [x[valid][None] for x in case]
    near(full, LOSSES[name](*picked, torch.ones_like(picked[0], dtype=torch.bool)))


@pytest.mark.parametrize("name", LOSSES)
@given(**cases)
def test_losses_ignore_values_at_invalid_steps(name, B, T, seed):
    case, valid = random_case(B, T, seed)
    for noise in (1e6, float("nan"), float("inf")):
        disturbed = [torch.where(valid, x, noise) for x in case]
        assert torch.equal(LOSSES[name](*case, valid), LOSSES[name](*disturbed, valid))


@pytest.mark.parametrize("name", LOSSES)
def test_masked_mean_without_valid_steps_is_zero(name):
    case, valid = random_case(2, 3, 0)
    assert float(LOSSES[name](*case, torch.zeros_like(valid))) == 0.0


def test_masked_mean_by_hand():
    # (1 + 3) / 2
    assert float(losses.masked_mean(numbers(1, 100, 3), mask(1, 0, 1))) == 2.0


def test_masked_normalize_by_hand():
    # Valid: 1 and 5. Mean 3, deviation 2: -1 and +1.
    normalized = losses.masked_normalize(numbers(1, 100, 5), mask(1, 0, 1))
    near(normalized[:, [0, 2]], [[-1.0, 1.0]])


@given(**cases)
def test_masked_normalize_mean_and_deviation(B, T, seed):
    case, valid = random_case(B, T + 2, seed)
    valid[0, :2] = True
    normalized = losses.masked_normalize(case[0], valid)[valid]
    near(normalized.mean(), 0.0)
    torch.testing.assert_close(normalized.std(correction=0), torch.tensor(1.0, dtype=torch.float64), rtol=1e-4, atol=0)


def test_masked_normalize_ignores_invalid_steps():
    quiet = losses.masked_normalize(numbers(1, 2, 5), mask(1, 0, 1))
    loud = losses.masked_normalize(numbers(1, 1e9, 5), mask(1, 0, 1))
    assert torch.equal(quiet[:, [0, 2]], loud[:, [0, 2]])


def test_masked_normalize_of_one_valid_step_is_zero():
    assert float(losses.masked_normalize(numbers(4, 100), mask(1, 0))[0, 0]) == 0.0


def test_masked_normalize_of_equal_numbers_is_finite():
    assert losses.masked_normalize(numbers(4, 4, 4), ALL_VALID).tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),  # -2 * 1
        (1.1, 2.0, -2.2),  # inside the range: -2 * 1.1
        (1.5, 2.0, -2.4),  # too far up and good: max(-3, -2 * 1.2)
        (0.5, 2.0, -1.0),  # down although good: max(-1, -2 * 0.8), not held back
        (1.5, -2.0, 3.0),  # up although bad: max(3, 2 * 1.2), not held back
        (0.5, -2.0, 1.6),  # too far down and bad: max(1, 2 * 0.8)
    ],
)
def test_the_policy_loss_by_hand(ratio, advantage, loss):
    valid = mask(1)
    near(losses.policy_loss(numbers(math.log(ratio)), numbers(advantage), valid, 0.2), loss)


def test_the_policy_loss_averages_over_steps():
    # (-2 + 3) / 2; the third step is nobody's.
    loss = losses.policy_loss(numbers(0, 0, 9), numbers(2, -3, 50), mask(1, 1, 0), 0.2)
    near(loss, 0.5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "pulls"),
    [(1.0, 2.0, True), (1.5, 2.0, False), (0.5, 2.0, True), (1.5, -2.0, True), (0.5, -2.0, False)],
)
def test_clipped_ratio_has_no_gradient(ratio, advantage, pulls):
    log_ratio = numbers(math.log(ratio)).requires_grad_()
    losses.policy_loss(log_ratio, numbers(advantage), mask(1), 0.2).backward()
    near(log_ratio.grad, [[-advantage * ratio if pulls else 0.0]])


def test_the_value_loss_by_hand():
    # 1/2 * ((1 - 3)^2 + (2 - 2)^2) / 2 = 1
    near(losses.value_loss(numbers(1, 2, 9), numbers(0, 0, 0), numbers(3, 2, 0), mask(1, 1, 0), None), 1.0)


@pytest.mark.parametrize(
    ("value", "old", "returns", "loss"),
    [
        (1.05, 1.0, 2.0, 0.5 * 0.95**2),  # moved less than 0.1: no clip
        (1.5, 1.0, 2.0, 0.5 * 0.9**2),  # towards the return: max(0.5^2, (1.1 - 2)^2)
        (0.5, 1.0, 2.0, 0.5 * 1.5**2),  # away from it: max(1.5^2, (0.9 - 2)^2)
        (0.5, 1.0, 0.0, 0.5 * 0.9**2),  # down towards the return: max(0.5^2, (0.9 - 0)^2)
    ],
)
def test_the_clipped_value_loss_by_hand(value, old, returns, loss):
    near(losses.value_loss(numbers(value), numbers(old), numbers(returns), mask(1), 0.1), loss)


def test_approximate_kl_by_hand():
    # r = 2: 2 - 1 - log 2; r = 1: 0; mean of both
    near(losses.approximate_kl(numbers(math.log(2), 0, 7), mask(1, 1, 0)), (1 - math.log(2)) / 2)


@given(**cases)
def test_approximate_kl_is_never_negative(B, T, seed):
    case, valid = random_case(B, T, seed)
    assert float(losses.approximate_kl(case[0], valid)) >= 0


def test_the_clip_fraction_by_hand():
    # 1.3 and 0.7 are outside 0.8..1.2, 1.1 is inside, the last is nobody's: 2 of 3.
    ratios = torch.tensor([[1.3, 1.1, 0.7, 5.0]], dtype=torch.float64)
    near(losses.clip_fraction(ratios.log(), mask(1, 1, 1, 0), 0.2), 2 / 3)


def test_explained_variance_by_hand():
    # R = 1 2 3: variance 2/3. Right values: 1. A constant: 0. R - v = 1 4 -5 + ..: worse than nothing.
    returns = numbers(1, 2, 3)
    near(losses.explained_variance(returns, returns, ALL_VALID), 1.0)
    near(losses.explained_variance(returns + 5, returns, ALL_VALID), 1.0)
    near(losses.explained_variance(numbers(7, 7, 7), returns, ALL_VALID), 0.0)
    # R - v = 2 0 -2 + 2: variance 8/3, four times that of R: 1 - 4
    near(losses.explained_variance(numbers(3, 2, 1) - 2, returns, ALL_VALID), -3.0)
    # Half of the way: R - v = 0.5 1 1.5, a quarter of the variance.
    near(losses.explained_variance(returns / 2, returns, ALL_VALID), 0.75)


@pytest.mark.parametrize("value", [0.0, 2.0, -7.0])
def test_explained_variance_of_constant_returns(value):
    returns = numbers(2, 2, 2)
    assert float(losses.explained_variance(torch.full_like(returns, value), returns, ALL_VALID)) == 0.0
    assert float(losses.explained_variance(numbers(1, value, 3), returns, ALL_VALID)) == 0.0


@given(**cases)
def test_l2_distance_and_its_gradient(B, T, seed):
    (first, second, anchor, other), _ = random_case(B, T, seed)
    weights = [first.requires_grad_(), second[0].requires_grad_()]
    distance = losses.l2_distance(weights, [anchor, other[0]])
    near(distance, (first - anchor).square().sum() + (second[0] - other[0]).square().sum())
    distance.backward()
    near(weights[0].grad, 2 * (first - anchor))
    near(weights[1].grad, 2 * (second[0] - other[0]))


def test_l2_distance_by_hand():
    # (1 - 0)^2 + (2 - 4)^2 + (3 - 3)^2 = 5, and to zeros 1 + 4 + 9 = 14
    weight = numbers(1, 2, 3).requires_grad_()
    assert losses.l2_distance([weight], [numbers(0, 4, 3)]).item() == 5.0
    from_zero = losses.l2_distance(iter([weight]))
    assert from_zero.item() == 14.0
    from_zero.backward()
    assert weight.grad.tolist() == [[2.0, 4.0, 6.0]]


def test_every_weight_has_its_anchor():
    with pytest.raises(ValueError, match="shorter"):
        losses.l2_distance([numbers(1), numbers(2)], [numbers(1)])


def test_total_loss_and_replay_errors_by_hand():
    ratios, zeros = numbers(1, 1.5, 9), numbers(0, 0, 0)
    outputs = {"act_log_prob": ratios.log(), "values": numbers(0.8, 3, 9), "entropy": numbers(2, 4, 9)}
    steps = {"act_log_prob": zeros, "values": numbers(0.5, 1.5, 0), "valid": mask(1, 1, 0)}
    loss, metrics = losses.ppo_loss(
        *(TensorDict(each, batch_size=[1, 3]) for each in (outputs, steps)),
        Targets(numbers(1, 1, 9), numbers(0.8, 1, 9)),
        clip_coef=0.2,
        vf_clip_coef=None,
        vf_coef=0.5,
        ent_coef=0.1,
        extra={"losses/other": (3.0, torch.tensor(7.0, dtype=torch.float64))},
    )
    # Surrogate -(1 + 1.2) / 2, squared value errors 0 and 4, entropy 3.
    near(loss, -1.1 + 0.5 * 0.5 * 2 - 0.1 * 3 + 3 * 7)
    near(metrics["losses/other"], 7.0)
    near(metrics["losses/importance"], 1.25)
    near(metrics["losses/clipfrac"], 0.5)
    near(metrics["ratio_error"], 0.5)
    # Relative where the value is above 1: 1.5 / 1.5; absolute below: 0.3.
    near(metrics["value_error"], 1.0)
