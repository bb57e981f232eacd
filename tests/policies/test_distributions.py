import math

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions

from holdfast import rng
from holdfast.errors import ContractError
from holdfast.policies import distribution_for
from holdfast.policies.distributions import (
    OCTAVES,
    Categorical,
    Gaussian,
    MultiCategorical,
    pink_draws_for,
    require_fit,
    sample,
)
from holdfast.worlds import WorldSpec

SHAPES = st.tuples(st.sampled_from("cmg"), st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
DTYPES = st.sampled_from([torch.float32, torch.float64])
UNIFORM = st.sampled_from([0.0, 2.0**-24, 0.25, 0.5, 1 - 2.0**-24])
EXTREME = [0.0, -1e-30, 1.0, -30.0, 80.0, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38]


def make(shape):
    """Not called in the strategy: annotations that run in tests draw random numbers."""
    letter, sizes = shape
    if letter == "m":
        return MultiCategorical(sizes)
    return Categorical(sum(sizes)) if letter == "c" else Gaussian(sizes[0])


def logits_for(kind, dtype, seed, *batch):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, kind.size, generator=generator, dtype=dtype)


def reference(kind, logits):
    """The same distribution by torch."""
    if isinstance(kind, Gaussian):
        mean, log_std = logits[..., : kind.count], logits[..., kind.count :]
        return distributions.Independent(distributions.Normal(mean, log_std.exp()), 1)
    return distributions.Categorical(logits=logits)


def components(kind, logits):
    """Independent distributions by torch, each with a function that selects its part of an action."""
    if not isinstance(kind, MultiCategorical):
        return [(reference(kind, logits), lambda action: action)]
    split = logits.split(kind.nvec, -1)
    return [
        (reference(kind, logits_of_one), lambda action, index=index: action[..., index])
        for index, logits_of_one in enumerate(split)
    ]


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1000))
def test_log_prob_and_entropy_equal_torch(shape, dtype, seed):
    kind = make(shape)
    logits = logits_for(kind, dtype, seed, 2, 3)
    params = kind.parameters(logits)
    uniform = torch.rand(2, 3, *kind.shape, generator=torch.Generator().manual_seed(seed))
    action = kind.sample(params, uniform)
    assert action.shape == (2, 3, *kind.shape)
    assert action.is_floating_point() == isinstance(kind, Gaussian)
    references = components(kind, logits)
    log_prob = sum(one.log_prob(index(action)) for one, index in references)
    entropy = sum(one.entropy() for one, _ in references)
    torch.testing.assert_close(kind.log_prob(params, action), log_prob)
    torch.testing.assert_close(kind.entropy(params), entropy)
    assert kind.greedy(params).shape == action.shape


@given(
    shape=SHAPES,
    dtype=DTYPES,
    numbers=st.lists(st.sampled_from(EXTREME), min_size=20, max_size=20),
    u=UNIFORM,
)
def test_extreme_logits_give_no_nan(shape, dtype, numbers, u):
    kind = make(shape)
    logits = torch.tensor(numbers[: kind.size], dtype=dtype)[None].requires_grad_()
    params = kind.parameters(logits)
    action = kind.sample(params, torch.full((1, *kind.shape), u))
    log_prob, entropy = kind.log_prob(params, action), kind.entropy(params)
    (log_prob.clamp(min=-100) + entropy).sum().backward()
    for tensor in (params, action, log_prob, entropy, kind.greedy(params), logits.grad):
        assert not tensor.isnan().any()
    assert action.isfinite().all()
    assert (entropy.isfinite() & (log_prob > torch.finfo(dtype).min / 2)).all()


def test_entropy_with_masked_actions():
    logits = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, -torch.inf, 5.0]], requires_grad=True)
    for kind in (Categorical(3), MultiCategorical((3,))):
        params = kind.parameters(logits)
        torch.testing.assert_close(kind.entropy(params), torch.tensor([math.log(2), 0.0]))
        kind.entropy(params).sum().backward()
        assert not logits.grad.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_samples_follow_the_cdf(dtype):
    count = 1 << 16
    uniform = (torch.arange(count) / count)[:, None]
    mean, log_std = 3.0, -1.0
    params = torch.tensor([mean, log_std], dtype=dtype).expand(count, 2)
    drawn = Gaussian(1).sample(params, uniform)[:, 0].double()
    expected = distributions.Normal(mean, math.exp(log_std)).cdf(drawn)
    # The number of samples below a point is that of the distribution, to within one.
    torch.testing.assert_close(expected, uniform[:, 0].double(), atol=1.5 / count, rtol=0)
    assert bool((drawn.diff() > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gaussian_samples_are_bounded_and_symmetric(dtype):
    ends = torch.tensor([[0.0, 1 - 2.0**-24, 0.5]])
    drawn = Gaussian(3).sample(torch.zeros(1, 6, dtype=dtype), ends)[0]
    assert drawn.dtype == dtype
    assert float(drawn[0]) == pytest.approx(-5.4, abs=0.1)
    assert float(drawn[1]) == pytest.approx(-float(drawn[0]), abs=1e-5)
    assert float(drawn[2].abs()) < 1e-6
    assert bool(Gaussian(3).sample(torch.zeros(1, 6), torch.ones(1, 3)).isfinite().all())


def test_multi_categorical_samples_are_independent():
    kind, count = MultiCategorical((2, 3)), 60_000
    shares = torch.tensor([0.3, 0.7, 0.2, 0.5, 0.3])
    uniform = kind.draws_for(0, torch.arange(count), clock=5)
    drawn = kind.sample(kind.parameters(shares.log()).expand(count, 5), uniform)
    table = torch.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=6) / count
    torch.testing.assert_close(table, torch.outer(shares[:2], shares[2:]).flatten(), atol=0.01, rtol=0)


def test_draws_for_counts_by_clock():
    agent = torch.arange(5)
    one = rng.uniform(3, rng.STREAM_ACTION, agent, 7)
    assert Categorical(4).draws_for(3, agent, 7).equal(one)
    assert MultiCategorical((4,)).draws_for(3, agent, 7).equal(one[:, None])
    for kind in (Gaussian(3), MultiCategorical((2, 2, 2))):
        assert kind.shape == (3,)
        expected = [rng.uniform(3, rng.STREAM_ACTION, agent, 3 * 7 + j) for j in range(3)]
        assert kind.draws_for(3, agent, 7).equal(torch.stack(expected, dim=1))
    draws = torch.stack([Gaussian(3).draws_for(0, agent, clock) for clock in range(50)])
    assert len(draws.unique()) == draws.numel()


def test_pink_noise_is_normal_and_correlated_over_time():
    """A sum of octaves: at a distance of d steps, 1 - d / 2^k of octave k are still the same number."""
    kind, clock = Gaussian(2), torch.arange(2**9)
    uniform = pink_draws_for(kind, 0, torch.arange(500)[:, None], clock)
    assert uniform.dtype == torch.float32
    assert 0 <= float(uniform.min()) < 1e-4 < 1 - 1e-4 < float(uniform.max()) < 1
    normal = kind.sample(torch.zeros(*uniform.shape[:2], 4), uniform)
    assert float(normal.mean()) == pytest.approx(0, abs=0.02)
    assert float(normal.std()) == pytest.approx(1, abs=0.02)
    assert float((normal[..., 0] * normal[..., 1]).mean()) == pytest.approx(0, abs=0.02)
    for distance in (1, 4, 16, 32):
        expected = sum(max(0.0, 1 - distance / 2**octave) for octave in range(OCTAVES)) / OCTAVES
        assert float((normal[:, distance:] * normal[:, :-distance]).mean()) == pytest.approx(expected, abs=0.02)


def test_pink_noise_is_a_function_of_seed_agent_and_clock():
    kind, agent, clock = Gaussian(3), torch.arange(5)[:, None], torch.arange(40)
    uniform = pink_draws_for(kind, 3, agent, clock)
    assert uniform[2:, 7:9].equal(pink_draws_for(kind, 3, agent[2:], clock[7:9]))
    assert not uniform.equal(pink_draws_for(kind, 4, agent, clock))


def test_greedy_is_the_mode():
    logits = torch.tensor([[0.0, 2.0, 1.0, -1.0, 3.0]])
    assert Categorical(5).greedy(logits).tolist() == [4]
    assert MultiCategorical((3, 2)).greedy(logits).tolist() == [[1, 1]]
    assert Gaussian(2).greedy(logits[:, :4]).tolist() == [[0.0, 2.0]]


def test_gaussian_sample_has_no_gradient():
    logits = torch.tensor([[0.5, 0.1]], requires_grad=True)
    params = Gaussian(1).parameters(logits)
    action = Gaussian(1).sample(params, torch.tensor([[0.9]]))
    assert not action.requires_grad
    Gaussian(1).log_prob(params, action).sum().backward()
    # d/dm = (a - m) / s^2
    gradient = (float(action) - 0.5) / math.exp(0.2)
    assert float(logits.grad[0, 0]) == pytest.approx(gradient, rel=1e-5)
    assert gradient > 1


def test_log_std_is_clamped():
    logits = torch.tensor([[100.0, -50.0], [100.0, 50.0]])
    torch.testing.assert_close(Gaussian(1).parameters(logits), torch.tensor([[100.0, -5.1], [100.0, 10.1]]))


def test_distribution_for_each_action_space():
    assert distribution_for(WorldSpec((1,), ("a", "b"))) == Categorical(2)
    assert distribution_for(WorldSpec((1,), (), action=spaces.MultiDiscrete([3, 2]))) == MultiCategorical((3, 2))
    assert distribution_for(WorldSpec((1,), (), action=spaces.Box(-1, 1, (4,)))) == Gaussian(4)
    assert [Categorical.key, MultiCategorical.key, Gaussian.key] == ["full_log_probs"] * 2 + ["gaussian"]


@pytest.mark.parametrize("kind", [MultiCategorical((2, 3)), Gaussian(2)])
def test_wrong_number_of_logits_raises(kind):
    with pytest.raises(ContractError, match=f"gives 3 logits; .* takes {kind.size}"):
        kind.parameters(torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("actual", "num_logits", "expected", "message"),
    [
        (Categorical(), 3, Categorical(4), "The policy gives 3 logits; the world has 4 actions"),
        (Categorical(3), 3, Categorical(4), "actions are Categorical.count=3.; the world's are Cat"),
        (
            Categorical(),
            4,
            Gaussian(2),
            "self.actions = holdfast.policies.distribution_for.spec., and give 4 log",
        ),
        (Gaussian(2), 4, Categorical(4), "The policy's actions are Gaussian"),
        (MultiCategorical((2, 3)), 5, MultiCategorical((3, 2)), "nvec=.2, 3.*nvec=.3, 2"),
    ],
)
def test_require_fit_raises(actual, num_logits, expected, message):
    with pytest.raises(ContractError, match=message):
        require_fit(actual, num_logits, expected)


def test_require_fit_passes():
    require_fit(Categorical(), 4, Categorical(4))
    require_fit(Gaussian(2), 4, Gaussian(2))
    assert int(sample(torch.zeros(1, 2), torch.tensor([0.75]))[0]) == 1


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1000))
def test_kl_and_cross_entropy_equal_torch(shape, dtype, seed):
    kind = make(shape)
    teacher, student = (logits_for(kind, dtype, seed + number, 2, 3) for number in (0, 2000))
    pairs = zip(components(kind, teacher), components(kind, student), strict=True)
    expected = sum(distributions.kl_divergence(p, q) for (p, _), (q, _) in pairs)
    params_p, params_q = kind.parameters(teacher), kind.parameters(student)
    torch.testing.assert_close(kind.kl(params_p, params_q), expected, rtol=1e-4, atol=1e-5)
    cross_entropy = expected + sum(p.entropy() for p, _ in components(kind, teacher))
    torch.testing.assert_close(kind.cross_entropy(params_p, params_q), cross_entropy, rtol=1e-4, atol=1e-5)


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1000), scale=st.sampled_from([1.0, 1e3, 1e30]))
def test_kl_with_itself_is_exactly_zero(shape, dtype, seed, scale):
    kind = make(shape)
    params = kind.parameters(logits_for(kind, dtype, seed, 2, 3) * scale)
    assert kind.kl(params, params).tolist() == [[0.0] * 3] * 2
    assert torch.equal(kind.cross_entropy(params, params), kind.entropy(params))


def test_kl_and_cross_entropy_by_hand():
    # p = 1/4 3/4, q = 1/2 1/2: 1/4 log 1/2 + 3/4 log 3/2; and -E_p[log q] = log 2
    p, q = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.25, 0.75], [0.5, 0.5]))
    kl = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    for kind, times in ((Categorical(2), 1), (MultiCategorical((2, 2)), 2)):
        pair = [torch.cat([log_probs] * times, -1) for log_probs in (p, q)]
        assert kind.kl(*pair).item() == pytest.approx(times * kl, rel=1e-12)
        assert kind.cross_entropy(*pair).item() == pytest.approx(times * math.log(2), rel=1e-12)
    # m = 0, s = 1 against m = 3, s = 2: log 2 + (1 + 9) / 8 - 1/2
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, math.log(2)]])
    assert Gaussian(1).kl(p, q).item() == pytest.approx(math.log(2) + 0.75, rel=1e-6)
    cross_entropy = 0.5 * math.log(2 * math.pi) + math.log(2) + 10 / 8
    assert Gaussian(1).cross_entropy(p, q).item() == pytest.approx(cross_entropy, rel=1e-6)


def test_gaussian_kl_is_precise_near_zero():
    # Log standard deviations 3e-5 kl: 3e-5^2 is left, which (1 + 6e-5) / 2 - 1/2 - 3e-5 would lose.
    p, q = torch.tensor([[0.3, 0.1]]), torch.tensor([[0.3, 0.1 + 3e-5]])
    exactly = Gaussian(1).kl(p.double(), q.double()).item()
    assert exactly == pytest.approx(9e-10, rel=1e-2)
    assert Gaussian(1).kl(p, q).item() == pytest.approx(exactly, abs=5e-12)


def test_kl_with_masked_actions():
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    p, q = Categorical(3).parameters(logits), Categorical(3).parameters(torch.tensor([[1.0, 0.0, -math.inf]]))
    short = [log_probs[:, :2] for log_probs in (p, q)]
    assert torch.equal(Categorical(3).kl(p, q), Categorical(2).kl(*short))
    # KL is finite where only the student may act, and huge where only the teacher may.
    more = Categorical(3).parameters(torch.zeros(1, 3))
    assert 0 < Categorical(3).kl(p, more).item() < 2
    assert Categorical(3).kl(more, p).item() > 1e30
