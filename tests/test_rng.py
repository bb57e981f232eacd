import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import rng

SEEDS = st.integers(-(2**70), 2**70)
STREAMS = st.integers(0, 20)
STEPS = st.integers(0, 2**40)
CPU = torch.device("cpu")


def chi_square(counts):
    """The sum of (seen - expected)^2 / expected; about as large as the number of bins if uniform."""
    expected = counts.sum() / len(counts)
    return float(((counts - expected) ** 2 / expected).sum())


@given(SEEDS, STREAMS, STEPS)
def test_random_bits_are_deterministic(seed, stream, step):
    agents = torch.arange(7)
    assert torch.equal(rng.random_bits(seed, stream, agents, step), rng.random_bits(seed, stream, agents, step))


@given(SEEDS, STREAMS, STEPS, st.integers(0, 30), st.integers(1, 30))
def test_random_bits_do_not_depend_on_the_batch(seed, stream, step, start, length):
    all_bits = rng.random_bits(seed, stream, torch.arange(60), step)
    some = rng.random_bits(seed, stream, torch.arange(start, start + length), step)
    assert torch.equal(some, all_bits[start : start + length])


@given(SEEDS, STREAMS, STEPS)
def test_random_bits_do_not_depend_on_shape_or_order(seed, stream, step):
    agents = torch.arange(24)
    flat = rng.random_bits(seed, stream, agents, step)
    square = rng.random_bits(seed, stream, agents.reshape(2, 3, 4), step)
    assert torch.equal(square.flatten(), flat)
    assert torch.equal(rng.random_bits(seed, stream, agents.flip(0), step), flat.flip(0))


@given(SEEDS, STREAMS, st.lists(st.integers(0, 2**62), min_size=1, max_size=8))
def test_step_may_be_int_or_tensor(seed, stream, steps):
    agents = torch.arange(len(steps)) * 3
    together = rng.random_bits(seed, stream, agents, torch.tensor(steps))
    alone = [rng.random_bits(seed, stream, agents[i : i + 1], step) for i, step in enumerate(steps)]
    assert torch.equal(together, torch.cat(alone))


def splitmix(seed, stream, agent, step):
    """What `bits` must be, in Python's unbounded integers."""
    golden, wrap, word = 0x9E3779B97F4A7C15, 2**64, seed
    for part in (agent, stream, step):
        word = (word + part * golden) % wrap
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % wrap
        word = (word ^ word >> 27) * 0x94D049BB133111EB % wrap
        word = word ^ word >> 31
    return word - wrap if word >= wrap // 2 else word


@given(SEEDS, STREAMS, st.integers(0, 2**31), STEPS)
def test_random_bits_match_splitmix64(seed, stream, agent, step):
    drawn = rng.random_bits(seed, stream, torch.tensor([agent]), step)
    word = splitmix(seed, stream, agent, step)
    assert int(drawn) == word
    # The highest bits make the numbers: 24 of them a float, 31 a whole number.
    place = (seed, stream, torch.tensor([agent]), step)
    assert float(rng.uniform(*place)) == (word % 2**64 >> 40) / 2**24
    assert int(rng.randint(100, *place)) == (word % 2**64 >> 33) * 100 >> 31


@given(SEEDS, STREAMS, STEPS)
def test_torch_and_numpy_bits_are_equal(seed, stream, step):
    together = rng.random_bits(seed, stream, torch.arange(5), step)
    # One agent's are mixed by torch, as everybody's are on a GPU.
    assert [int(rng.random_bits(seed, stream, torch.tensor(agent), step)) for agent in range(5)] == together.tolist()
    assert rng.random_bits(seed, stream, torch.arange(5), torch.tensor(step)).equal(together)


def test_random_bits_golden_values():
    # A seed means the same run from one version to the next only while these do not change.
    agents = torch.arange(2)
    assert rng.random_bits(0, rng.STREAM_WORLD, agents, 0).tolist() == [
        5197578548964807871,
        -5432831574128818718,
    ]


def test_seed_stream_agent_and_step_all_matter():
    agents = torch.arange(1000)
    here = rng.random_bits(5, 1, agents, 9)
    for other in (
        rng.random_bits(6, 1, agents, 9),
        rng.random_bits(5, 2, agents, 9),
        rng.random_bits(5, 1, agents + 1000, 9),
        rng.random_bits(5, 1, agents, 10),
        rng.random_bits(1, 5, agents, 9),
        rng.random_bits(5, 9, agents, 1),
    ):
        assert not (here == other).any()


def test_random_bits_have_no_collisions():
    agents, steps = torch.arange(100), torch.arange(100)
    bits = [
        rng.random_bits(seed, stream, agents[:, None].expand(100, 100), steps.expand(100, 100)).flatten()
        for seed in (-2, -1, 0, 1, 2)
        for stream in (1, 2, 3, 4)
    ]
    assert len(torch.cat(bits).unique()) == 20 * 100 * 100


def test_streams_are_distinct():
    assert len({rng.STREAM_WORLD, rng.STREAM_ACTION, rng.STREAM_MINIBATCH}) == 3


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_random_bits_do_not_depend_on_dtype(dtype):
    agents = torch.arange(100)
    drawn = rng.random_bits(1, 1, agents, 3)
    assert torch.equal(rng.random_bits(1, 1, agents.to(dtype), 3), drawn)
    assert torch.equal(rng.random_bits(1, 1, agents, torch.full_like(agents, 3, dtype=dtype)), drawn)


@given(SEEDS, STREAMS, STEPS)
def test_uniform_range(seed, stream, step):
    drawn = rng.uniform(seed, stream, torch.arange(500), step)
    assert drawn.dtype == torch.float32
    assert bool(((drawn >= 0) & (drawn < 1)).all())


def test_uniform_and_randint_extreme_bits(monkeypatch):
    for word in (-1, 0, 2**63 - 1, -(2**63)):
        monkeypatch.setattr(rng, "random_bits", lambda *place, word=word: torch.tensor([word]))
        assert 0 <= float(rng.uniform(0, 0, torch.arange(1), 0)) < 1
        assert 0 <= int(rng.randint(7, 0, 0, torch.arange(1), 0)) < 7


@pytest.mark.parametrize("seed", [0, 1, -1, 123456789, 2**64 + 3])
def test_uniform_chi_square(seed):
    # 100 bins of about 1000: the sum has mean 99 and deviation 14; 180 is almost six of them away.
    across = rng.uniform(seed, 1, torch.arange(100_000), 3)
    along = rng.uniform(seed, 1, torch.zeros(100_000, dtype=torch.long), torch.arange(100_000))
    for drawn in (across, along):
        assert chi_square(torch.histc(drawn, bins=100, min=0, max=1)) < 180
        assert abs(float(drawn.mean()) - 0.5) < 0.005


@pytest.mark.parametrize("places", [range(8), range(28, 36), range(56, 64)])
def test_bits_are_balanced(places):
    words = rng.random_bits(3, 2, torch.arange(40_000), 17)
    for place in places:
        # The deviation of the share is 0.0025.
        assert abs(float((words >> place & 1).float().mean()) - 0.5) < 0.015


@pytest.mark.parametrize("seed", [0, 7])
def test_neighbouring_draws_are_uncorrelated(seed):
    agents, steps = torch.arange(300), torch.arange(300)
    drawn = rng.uniform(seed, 1, agents[:, None].expand(300, 300), steps.expand(300, 300)).double() - 0.5
    seeds = rng.uniform(seed + 1, 1, agents[:, None].expand(300, 300), steps.expand(300, 300)) - 0.5
    stream = rng.uniform(seed, 2, agents[:, None].expand(300, 300), steps.expand(300, 300)) - 0.5
    pairs = {
        "agents": (drawn[1:], drawn[:-1]),
        "steps": (drawn[:, 1:], drawn[:, :-1]),
        "diagonal": (drawn[1:, :-1], drawn[:-1, 1:]),
        "seeds": (drawn, seeds),
        "streams": (drawn, stream),
    }
    for name, (a, b) in pairs.items():
        # 90,000 pairs: the deviation of a correlation is 0.0033.
        assert abs(float((a * b).mean()) * 12) < 0.02, name


@given(st.integers(1, 2**31), SEEDS, STREAMS, STEPS)
def test_randint_range(limit, seed, stream, step):
    drawn = rng.randint(limit, seed, stream, torch.arange(200), step)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < limit


@pytest.mark.parametrize("limit", [2, 3, 4, 7, 100])
def test_randint_chi_square(limit):
    drawn = rng.randint(limit, 4, 1, torch.arange(1000 * limit), 6)
    # Mean limit - 1, deviation sqrt(2 (limit - 1)): six of them and a little for the small limits.
    assert chi_square(torch.bincount(drawn, minlength=limit)) < limit + 6 * (2 * limit) ** 0.5 + 10


def test_randint_limit_one():
    assert not rng.randint(1, 9, 1, torch.arange(100), 4).any()


@given(st.integers(0, 200), SEEDS, STEPS)
def test_permutation_is_complete_and_deterministic(size, seed, step):
    order = rng.permutation(size, seed, rng.STREAM_MINIBATCH, step, CPU)
    assert sorted(order.tolist()) == list(range(size))
    assert torch.equal(order, rng.permutation(size, seed, rng.STREAM_MINIBATCH, step, CPU))


def test_permutations_differ_by_step_and_seed():
    orders = {tuple(rng.permutation(30, seed, 3, step, CPU).tolist()) for seed in range(5) for step in range(20)}
    assert len(orders) == 100


def test_permutation_first_item_is_uniform():
    firsts = torch.tensor([int(rng.permutation(4, 0, 3, step, CPU)[0]) for step in range(2000)])
    # Three degrees of freedom; 30 is reached once in a million trials.
    assert chi_square(torch.bincount(firsts, minlength=4)) < 30


@settings(max_examples=30)
@given(st.integers(2**63, 2**200))
def test_seeds_of_any_size_work(seed):
    agents = torch.arange(50)
    for number in (seed, -seed):
        drawn = rng.uniform(number, 1, agents, 0)
        assert len(drawn.unique()) > 40
        assert torch.equal(drawn, rng.uniform(number % 2**64, 1, agents, 0))
