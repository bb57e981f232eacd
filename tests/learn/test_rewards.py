"""Rewards as the learner sees them."""

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.learn.rewards import RewardNormalizer, discounted_returns
from holdfast.policies.normalization import CLIP
from holdfast.rollout.segments import Segments

GAMMA = 0.9


def rollouts(seed, agents=3, segments=2, horizon=4, count=3):
    """Random rollouts with ends and invalid steps, as a collector returns them; and their steps in order."""
    generator = torch.Generator().manual_seed(seed)
    length = segments * horizon
    shape = (agents, count * length + 1)
    rewards = torch.randn(shape, generator=generator) * 50
    dones, truncateds = torch.rand((2, *shape), generator=generator) < 0.15
    valid = torch.rand(shape, generator=generator) < 0.8
    leaves = {"rewards": rewards, "dones": dones & ~truncateds, "truncateds": truncateds, "valid": valid}
    steps, parts = TensorDict(leaves, batch_size=shape), []
    for number in range(count):
        rows = steps[:, number * length : (number + 1) * length].unflatten(1, (segments, horizon))
        after = [steps[:, number * length + (k + 1) * horizon] for k in range(segments)]
        tail = torch.stack(after, dim=1)
        version = torch.full((agents * segments,), number)
        parts.append(
            Segments(rows.flatten(0, 1), TensorDict({}, [agents * segments]), tail.flatten(0, 1), version, agents)
        )
    return parts, steps


def loop(steps):
    """All discounted returns by a loop over steps, in the order of time."""
    agents, total = steps.shape
    returns, current = [], np.zeros(agents)
    for t in range(total - 1):
        for agent in range(agents):
            if steps["valid"][agent, t]:
                current[agent] = GAMMA * current[agent] + float(steps["rewards"][agent, t + 1])
                returns.append(current[agent])
            if steps["dones"][agent, t + 1] or steps["truncateds"][agent, t + 1]:
                current[agent] = 0
    return np.array(returns)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_the_deviation_is_that_of_all_discounted_returns_so_far(seed):
    parts, steps = rollouts(seed)
    normalizer = RewardNormalizer()
    for part in parts:
        normalized = normalizer.normalize(part, GAMMA)
    std = loop(steps).std()
    expected = (parts[-1].steps["rewards"] / std).clamp(-CLIP, CLIP)
    torch.testing.assert_close(normalized.steps["rewards"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        normalized.tail["rewards"], (parts[-1].tail["rewards"] / std).clamp(-CLIP, CLIP), rtol=1e-4, atol=1e-5
    )


def test_the_stored_rewards_stay_raw_and_all_else_is_shared():
    (part, *_), _ = rollouts(0)
    raw = part.steps["rewards"].clone()
    normalized = RewardNormalizer().normalize(part, GAMMA)
    assert torch.equal(part.steps["rewards"], raw)
    assert not torch.equal(normalized.steps["rewards"], raw)
    assert normalized.steps["valid"].data_ptr() == part.steps["valid"].data_ptr()


def test_a_restored_normalizer_goes_on_as_the_saved_one():
    parts, _ = rollouts(1)
    one, other = RewardNormalizer(), RewardNormalizer()
    one.normalize(parts[0], GAMMA)
    other.restore(one.state())
    results = [each.normalize(parts[1], GAMMA).steps["rewards"] for each in (one, other)]
    assert torch.equal(*results)
    fresh = RewardNormalizer().normalize(parts[1], GAMMA).steps["rewards"]
    assert not torch.equal(fresh, results[0])


def test_agents_that_start_a_new_episode_start_a_new_return():
    parts, _ = rollouts(1)
    one, other = RewardNormalizer(), RewardNormalizer()
    one.normalize(parts[0], GAMMA)
    saved = one.state()
    assert saved["return"].abs().min() > 0
    mask = torch.arange(len(saved["return"])) == 1
    other.restore(saved)
    other.reset_agents(mask)
    assert torch.equal(other.state()["return"], torch.where(mask, 0.0, saved["return"]))
    RewardNormalizer().reset_agents(mask)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mean", float("nan"), "running statistics must be finite"),
        ("var", -1.0, "variance and count not negative"),
        ("return", [0.0, float("inf"), 0.0], "saved returns must be finite"),
        ("return", [0, 1, 2], "saved returns must be finite numbers"),
    ],
)
def test_damaged_state_is_refused(name, value, message):
    parts, _ = rollouts(1)
    one, other = RewardNormalizer(), RewardNormalizer()
    one.normalize(parts[0], GAMMA)
    state = one.state()
    state[name] = torch.tensor(value, dtype=torch.float64 if name != "return" else None)
    with pytest.raises(ContractError, match=message):
        other.restore(state)


def test_returns_of_another_number_of_agents_are_refused():
    parts, _ = rollouts(1)
    normalizer = RewardNormalizer()
    normalizer.restore({**normalizer.state(), "return": torch.zeros(1)})
    with pytest.raises(ContractError, match=r"saved returns are \[1\], must be \[3\]"):
        normalizer.normalize(parts[0], GAMMA)


def test_rewards_agree_with_gymnasiums_wrapper():
    class Pays(gymnasium.Env):
        observation_space = gymnasium.spaces.Discrete(1)
        action_space = gymnasium.spaces.Discrete(1)

        def reset(self, *, seed=None, options=None):
            return 0, {}

        def step(self, action):
            return 0, float(next(coming)), False, False, {}

    rewards = np.linspace(-3, 8, 400) ** 2
    coming = iter(rewards)
    env = gymnasium.wrappers.NormalizeReward(Pays(), gamma=GAMMA)
    env.reset()
    normalized = [env.step(0)[1] for _ in rewards]
    returns = discounted_returns(
        torch.tensor(rewards)[None],
        torch.ones(1, 400, dtype=torch.bool),
        torch.zeros(1, 400, dtype=torch.bool),
        torch.zeros(1, dtype=torch.float64),
        GAMMA,
    )
    # It starts with one number of variance 1, which matters less and less.
    assert normalized[-1] == pytest.approx(float(rewards[-1] / returns.std(correction=0)), rel=0.01)
