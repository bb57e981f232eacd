import math

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions

from holdfast.errors import ContractError
from holdfast.policies import actions_of
from holdfast.policies.actions import Categorical, Gaussian, MultiCategorical, require_fit, sample
from holdfast.worlds import WorldSpec, draws

SHAPES = st.tuples(st.sampled_from("cmg"), st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
DTYPES = st.sampled_from([torch.float32, torch.float64])
UNIFORM = st.sampled_from([0.0, 2.0**-24, 0.25, 0.5, 1 - 2.0**-24])
EXTREME = [0.0, -1e-30, 1.0, -30.0, 80.0, 1e4, -1e4, 1e30, -1e30, 3e38, -3e38]


def make(shape):
    """Built in the test, not in the strategy: annotations that run in tests draw random numbers."""
    letter, sizes = shape
    if letter == "m":
        return MultiCategorical(sizes)
    return Categorical(sum(sizes)) if letter == "c" else Gaussian(sizes[0])


def scores_of(kind, dtype, seed, *batch):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*batch, kind.size, generator=generator, dtype=dtype)


def reference(kind, scores):
    """The same distribution by torch."""
    if isinstance(kind, Gaussian):
        mean, log_deviation = scores[..., : kind.count], scores[..., kind.count :]
        return distributions.Independent(distributions.Normal(mean, log_deviation.exp()), 1)
    return distributions.Categorical(logits=scores)


def parts(kind, scores):
    """Distributions whose log-probabilities and entropies add up, with what each says of an action."""
    if not isinstance(kind, MultiCategorical):
        return [(reference(kind, scores), lambda action: action)]
    split = scores.split(kind.nvec, -1)
    return [
        (reference(kind, part), lambda action, number=number: action[..., number])
        for number, part in enumerate(split)
    ]


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1000))
def test_likelihood_and_entropy_are_those_of_torch(shape, dtype, seed):
    kind = make(shape)
    scores = scores_of(kind, dtype, seed, 2, 3)
    told = kind.tell(scores)
    uniform = torch.rand(2, 3, *kind.shape, generator=torch.Generator().manual_seed(seed))
    action = kind.sample(told, uniform)
    assert action.shape == (2, 3, *kind.shape)
    assert action.is_floating_point() == isinstance(kind, Gaussian)
    each = parts(kind, scores)
    log_prob = sum(one.log_prob(of(action)) for one, of in each)
    entropy = sum(one.entropy() for one, _ in each)
    torch.testing.assert_close(kind.log_prob(told, action), log_prob)
    torch.testing.assert_close(kind.entropy(told), entropy)
    assert kind.greedy(told).shape == action.shape


@given(
    shape=SHAPES,
    dtype=DTYPES,
    numbers=st.lists(st.sampled_from(EXTREME), min_size=20, max_size=20),
    u=UNIFORM,
)
def test_extreme_scores_give_no_nan_and_actions_that_can_be_taken(shape, dtype, numbers, u):
    kind = make(shape)
    scores = torch.tensor(numbers[: kind.size], dtype=dtype)[None].requires_grad_()
    told = kind.tell(scores)
    action = kind.sample(told, torch.full((1, *kind.shape), u))
    likely, undecided = kind.log_prob(told, action), kind.entropy(told)
    (likely.clamp(min=-100) + undecided).sum().backward()
    for each in (told, action, likely, undecided, kind.greedy(told), scores.grad):
        assert not each.isnan().any()
    assert action.isfinite().all()
    assert (undecided.isfinite() & (likely > torch.finfo(dtype).min / 2)).all()


def test_what_cannot_happen_is_not_drawn_and_spoils_no_entropy():
    scores = torch.tensor([[0.0, -torch.inf, 0.0], [-torch.inf, -torch.inf, 5.0]], requires_grad=True)
    for kind in (Categorical(3), MultiCategorical((3,))):
        told = kind.tell(scores)
        torch.testing.assert_close(kind.entropy(told), torch.tensor([math.log(2), 0.0]))
        kind.entropy(told).sum().backward()
        assert not scores.grad.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_normal_numbers_are_drawn_as_often_as_they_should_be(dtype):
    count = 1 << 16
    uniform = (torch.arange(count) / count)[:, None]
    mean, log_deviation = 3.0, -1.0
    told = torch.tensor([mean, log_deviation], dtype=dtype).expand(count, 2)
    drawn = Gaussian(1).sample(told, uniform)[:, 0].double()
    expected = distributions.Normal(mean, math.exp(log_deviation)).cdf(drawn)
    # The number of draws below a point is what the distribution says, to within one.
    torch.testing.assert_close(expected, uniform[:, 0].double(), atol=1.5 / count, rtol=0)
    assert bool((drawn.diff() > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ends_of_what_can_be_drawn_are_symmetric_and_finite(dtype):
    ends = torch.tensor([[0.0, 1 - 2.0**-24, 0.5]])
    drawn = Gaussian(3).sample(torch.zeros(1, 6, dtype=dtype), ends)[0]
    assert drawn.dtype == dtype
    assert float(drawn[0]) == pytest.approx(-5.4, abs=0.1)
    assert float(drawn[1]) == pytest.approx(-float(drawn[0]), abs=1e-5)
    assert float(drawn[2].abs()) < 1e-6
    assert bool(Gaussian(3).sample(torch.zeros(1, 6), torch.ones(1, 3)).isfinite().all())


def test_several_choices_are_drawn_as_often_as_they_should_be_and_independently():
    kind, count = MultiCategorical((2, 3)), 60_000
    shares = torch.tensor([0.3, 0.7, 0.2, 0.5, 0.3])
    uniform = kind.uniform(0, torch.arange(count), clock=5)
    drawn = kind.sample(kind.tell(shares.log()).expand(count, 5), uniform)
    table = torch.bincount(drawn[:, 0] * 3 + drawn[:, 1], minlength=6) / count
    torch.testing.assert_close(table, torch.outer(shares[:2], shares[2:]).flatten(), atol=0.01, rtol=0)


def test_one_draw_is_the_draw_of_the_clock_and_several_count_on():
    agent = torch.arange(5)
    one = draws.uniform(3, draws.STREAM_ACTION, agent, 7)
    assert Categorical(4).uniform(3, agent, 7).equal(one)
    assert MultiCategorical((4,)).uniform(3, agent, 7).equal(one[:, None])
    for kind in (Gaussian(3), MultiCategorical((2, 2, 2))):
        assert kind.draws == 3
        expected = [draws.uniform(3, draws.STREAM_ACTION, agent, 3 * 7 + j) for j in range(3)]
        assert kind.uniform(3, agent, 7).equal(torch.stack(expected, dim=1))
    lived = torch.stack([Gaussian(3).uniform(0, agent, clock) for clock in range(50)])
    assert len(lived.unique()) == lived.numel()


def test_the_likeliest_action_is_greedy():
    scores = torch.tensor([[0.0, 2.0, 1.0, -1.0, 3.0]])
    assert Categorical(5).greedy(scores).tolist() == [4]
    assert MultiCategorical((3, 2)).greedy(scores).tolist() == [[1, 1]]
    assert Gaussian(2).greedy(scores[:, :4]).tolist() == [[0.0, 2.0]]


def test_an_action_is_what_was_done_and_has_no_graph():
    scores = torch.tensor([[0.5, 0.1]], requires_grad=True)
    told = Gaussian(1).tell(scores)
    action = Gaussian(1).sample(told, torch.tensor([[0.9]]))
    assert not action.requires_grad
    Gaussian(1).log_prob(told, action).sum().backward()
    # d/dm = (a - m) / s^2
    far = (float(action) - 0.5) / math.exp(0.2)
    assert float(scores.grad[0, 0]) == pytest.approx(far, rel=1e-5)
    assert far > 1


def test_deviations_stay_where_single_precision_can_replay_them():
    scores = torch.tensor([[100.0, -50.0], [100.0, 50.0]])
    torch.testing.assert_close(Gaussian(1).tell(scores), torch.tensor([[100.0, -5.1], [100.0, 10.1]]))


def test_a_world_says_which_kind_its_actions_are():
    assert actions_of(WorldSpec((1,), ("a", "b"))) == Categorical(2)
    assert actions_of(WorldSpec((1,), (), action=spaces.MultiDiscrete([3, 2]))) == MultiCategorical((3, 2))
    assert actions_of(WorldSpec((1,), (), action=spaces.Box(-1, 1, (4,)))) == Gaussian(4)
    assert [Categorical.key, MultiCategorical.key, Gaussian.key] == ["full_log_probs"] * 2 + ["gaussian"]


@pytest.mark.parametrize("kind", [MultiCategorical((2, 3)), Gaussian(2)])
def test_scores_that_are_too_many_or_too_few_are_told(kind):
    with pytest.raises(ContractError, match=f"gives 3 scores; .* takes {kind.size}"):
        kind.tell(torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("mine", "scored", "wanted", "told"),
    [
        (Categorical(), 3, Categorical(4), "The policy scores 3 actions; the world has 4"),
        (Categorical(3), 3, Categorical(4), "actions are Categorical.count=3.; the world's are Cat"),
        (Categorical(), 4, Gaussian(2), "self.actions = holdfast.policies.actions_of.spec., and give 4 sc"),
        (Gaussian(2), 4, Categorical(4), "The policy's actions are Gaussian"),
        (MultiCategorical((2, 3)), 5, MultiCategorical((3, 2)), "nvec=.2, 3.*nvec=.3, 2"),
    ],
)
def test_a_policy_for_another_world_is_told(mine, scored, wanted, told):
    with pytest.raises(ContractError, match=told):
        require_fit(mine, scored, wanted)


def test_a_policy_for_this_world_is_let_be():
    require_fit(Categorical(), 4, Categorical(4))
    require_fit(Gaussian(2), 4, Gaussian(2))
    assert int(sample(torch.zeros(1, 2), torch.tensor([0.75]))[0]) == 1


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1000))
def test_how_far_two_policies_are_is_what_torch_says(shape, dtype, seed):
    kind = make(shape)
    teacher, student = (scores_of(kind, dtype, seed + number, 2, 3) for number in (0, 2000))
    pairs = zip(parts(kind, teacher), parts(kind, student), strict=True)
    expected = sum(distributions.kl_divergence(p, q) for (p, _), (q, _) in pairs)
    told_p, told_q = kind.tell(teacher), kind.tell(student)
    torch.testing.assert_close(kind.kl(told_p, told_q), expected, rtol=1e-4, atol=1e-5)
    crossed = expected + sum(p.entropy() for p, _ in parts(kind, teacher))
    torch.testing.assert_close(kind.cross_entropy(told_p, told_q), crossed, rtol=1e-4, atol=1e-5)


@given(shape=SHAPES, dtype=DTYPES, seed=st.integers(0, 1000), scale=st.sampled_from([1.0, 1e3, 1e30]))
def test_a_policy_is_exactly_nothing_away_from_itself(shape, dtype, seed, scale):
    kind = make(shape)
    told = kind.tell(scores_of(kind, dtype, seed, 2, 3) * scale)
    assert kind.kl(told, told).tolist() == [[0.0] * 3] * 2
    assert torch.equal(kind.cross_entropy(told, told), kind.entropy(told))


def test_how_far_two_policies_are_by_hand():
    # p = 1/4 3/4, q = 1/2 1/2: 1/4 log 1/2 + 3/4 log 3/2; and -E_p[log q] = log 2
    p, q = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.25, 0.75], [0.5, 0.5]))
    apart = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    for kind, times in ((Categorical(2), 1), (MultiCategorical((2, 2)), 2)):
        twice = [torch.cat([each] * times, -1) for each in (p, q)]
        assert kind.kl(*twice).item() == pytest.approx(times * apart, rel=1e-12)
        assert kind.cross_entropy(*twice).item() == pytest.approx(times * math.log(2), rel=1e-12)
    # m = 0, s = 1 against m = 3, s = 2: log 2 + (1 + 9) / 8 - 1/2
    p, q = torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, math.log(2)]])
    assert Gaussian(1).kl(p, q).item() == pytest.approx(math.log(2) + 0.75, rel=1e-6)
    crossed = 0.5 * math.log(2 * math.pi) + math.log(2) + 10 / 8
    assert Gaussian(1).cross_entropy(p, q).item() == pytest.approx(crossed, rel=1e-6)


def test_numbers_drawn_nearly_alike_are_told_apart_in_single_precision():
    # Log deviations 3e-5 apart: 3e-5^2 is left, which (1 + 6e-5) / 2 - 1/2 - 3e-5 would lose.
    p, q = torch.tensor([[0.3, 0.1]]), torch.tensor([[0.3, 0.1 + 3e-5]])
    exactly = Gaussian(1).kl(p.double(), q.double()).item()
    assert exactly == pytest.approx(9e-10, rel=1e-2)
    assert Gaussian(1).kl(p, q).item() == pytest.approx(exactly, abs=5e-12)


def test_what_can_not_happen_takes_no_part_in_how_far_two_policies_are():
    scores = torch.tensor([[0.0, 1.0, -math.inf]])
    p, q = Categorical(3).tell(scores), Categorical(3).tell(torch.tensor([[1.0, 0.0, -math.inf]]))
    short = [told[:, :2] for told in (p, q)]
    assert torch.equal(Categorical(3).kl(p, q), Categorical(2).kl(*short))
    # A student that could do more than its teacher is finitely far; one that cannot do as much, very far.
    more = Categorical(3).tell(torch.zeros(1, 3))
    assert 0 < Categorical(3).kl(p, more).item() < 2
    assert Categorical(3).kl(more, p).item() > 1e30
