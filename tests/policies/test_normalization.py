"""Running statistics of observations and returns."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import holdfast
from helpers.manual_policy import NewLSTMPolicy
from helpers.space_worlds import IMAGE_SPEC, TREE_SPEC, SayNumber
from holdfast.errors import ContractError
from holdfast.policies.normalization import CLIP, ObsNormalizer, RunningStats, normalized_spec
from holdfast.policies.spaces import encoder_of
from holdfast.rollout.segments import policy_td
from holdfast.worlds import WorldSpec


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=5),
    shift=st.floats(-1e4, 1e4),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
)
def test_statistics_are_those_of_all_valid_numbers_together(sizes, shift, scale, seed):
    generator, stats, batches = torch.Generator().manual_seed(seed), RunningStats((3,)), []
    for size in sizes:
        batch = torch.randn(size, 2, 3, generator=generator) * scale + shift
        valid = torch.rand(size, 2, generator=generator) < 0.7
        batch[~valid] = torch.nan
        stats.update(batch, valid)
        batches.append(batch[valid].double())
    numbers = torch.cat(batches)
    assert int(stats.count) == len(numbers)
    if len(numbers):
        torch.testing.assert_close(stats.mean, numbers.mean(0), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(stats.var, numbers.var(0, correction=0), rtol=1e-6, atol=1e-9)
    else:
        assert stats.mean.tolist() == [0, 0, 0]
        assert stats.var.tolist() == [1, 1, 1]


def test_numbers_are_centred_scaled_clipped_and_back():
    stats = RunningStats()
    stats.update(torch.tensor([1.0, 3.0, 5.0, 7.0]), torch.ones(4, dtype=torch.bool))
    x = torch.tensor([4.0, 4 + 5**0.5, 1000.0, -1000.0])
    torch.testing.assert_close(stats.normalize(x), torch.tensor([0.0, 1.0, CLIP, -CLIP]))
    torch.testing.assert_close(stats.denormalize(stats.normalize(x[:2])), x[:2])


def test_before_the_first_rollout_nothing_changes():
    x = torch.tensor([0.5, -3.0])
    torch.testing.assert_close(RunningStats().normalize(x), x)


@pytest.mark.parametrize(
    ("shape", "is_normalized"), [((128,), True), ((84, 84), False), ((84, 84, 3), False)], ids=["RAM", "grey", "RGB"]
)
def test_bytes_in_a_vector_are_numbers_and_in_an_image_pixels(shape, is_normalized):
    space = spaces.Box(0, 255, shape, np.uint8)
    normalizer, obs = ObsNormalizer(space), torch.randint(0, 255, (5, *shape), dtype=torch.uint8)
    normalizer.update(obs, torch.ones(5, dtype=torch.bool))
    result = normalizer(obs)
    assert (result.dtype == torch.float32) == is_normalized
    assert not is_normalized or result.mean().abs() < 1e-5
    spec = WorldSpec(shape, ("a", "b"), observation=space)
    assert np.isfinite(normalized_spec(spec).observation_space.low).all() == (not is_normalized)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("mean", float("nan")),
        ("mean", 1e39),
        ("var", -1e-3),
        ("var", -1e-9),
        ("var", float("inf")),
        ("var", 1e80),
        ("count", -1.0),
        ("count", float("nan")),
    ],
)
def test_statistics_that_no_numbers_have_are_not_loaded(name, value):
    state = RunningStats((2,)).state_dict()
    state[name] = torch.full_like(state[name], value)
    with pytest.raises(ContractError, match="running statistics must be finite, and variance and count not negative"):
        RunningStats((2,)).load_state_dict(state)


SPACE = spaces.Dict(
    {
        "speed": spaces.Box(-50, 50, (2,), np.float32),
        "image": spaces.Box(0, 255, (3, 8, 8), np.uint8),
        "picture": spaces.Box(0, 1, (8, 8, 1), np.float32),
        "choice": spaces.Discrete(3),
        "inner": spaces.Tuple([spaces.Box(0, 1, (), np.float32), spaces.MultiBinary(2)]),
    }
)


def tree(rows):
    return TensorDict(
        {
            "speed": torch.arange(2.0 * rows).reshape(rows, 2),
            "image": torch.ones(rows, 3, 8, 8, dtype=torch.uint8),
            "picture": torch.rand(rows, 8, 8, 1),
            "choice": torch.ones(rows, dtype=torch.long),
            "inner": TensorDict({"0": torch.arange(1.0 * rows), "1": torch.ones(rows, 2, dtype=torch.int8)}, [rows]),
        },
        batch_size=[rows],
    )


def test_each_numeric_leaf_has_statistics_and_all_others_are_left_alone():
    normalizer, obs = ObsNormalizer(SPACE), tree(100)
    before = obs.clone()
    normalizer.update(obs, torch.ones(100, dtype=torch.bool))
    after = normalizer(obs)
    for name in ("image", "picture", "choice", ("inner", "1")):
        assert torch.equal(after[name], obs[name])
        assert after[name].dtype == obs[name].dtype
    for name in ("speed", ("inner", "0")):
        torch.testing.assert_close(after[name].mean(0), torch.zeros_like(after[name][0]), atol=1e-5, rtol=0)
        torch.testing.assert_close(after[name].std(0, correction=0), torch.ones_like(after[name][0]))
    assert bool((obs == before).all())


def test_a_policy_sees_what_is_normalized_without_bounds():
    space = normalized_spec(WorldSpec((), ("a",), observation=SPACE)).observation_space
    assert not space["speed"].is_bounded()
    assert space["speed"].dtype == np.float32
    assert not space["inner"][0].is_bounded()
    assert space["picture"] == SPACE["picture"]
    assert space["image"] == SPACE["image"]
    # Bounds would scale normalized numbers a second time.
    encoder = encoder_of(space["speed"], 8)
    assert encoder.reach.tolist() == [1, 1]
    tokens = holdfast.make_world("recall", agents=2).spec
    assert normalized_spec(tokens) is tokens


@pytest.mark.parametrize("spec", [TREE_SPEC, IMAGE_SPEC, SayNumber.spec], ids=["tree", "image", "vector"])
def test_statistics_are_saved_with_the_weights(spec):
    options = {"normalize_obs": True, "normalize_value": True}
    policy = holdfast.make_policy("fast", spec, seed=0, **options)
    for module in policy.modules():
        if isinstance(module, RunningStats):
            module.mean.fill_(3)
            module.var.fill_(4)
    other = holdfast.make_policy("fast", spec, seed=1, **options)
    other.load_state_dict(policy.state_dict())
    stats = [module for module in other.modules() if isinstance(module, RunningStats)]
    assert stats
    assert all(bool((module.mean == 3).all()) for module in stats)
    plain = holdfast.make_policy("fast", spec, seed=0)
    assert not any(isinstance(module, RunningStats) for module in plain.modules())


def test_values_are_in_units_of_returns():
    policy = holdfast.make_policy("fast", SayNumber.spec, seed=0, normalize_value=True)
    plain = holdfast.make_policy("fast", SayNumber.spec, seed=0)
    policy.value_norm.mean.fill_(-100)
    policy.value_norm.var.fill_(400)
    obs, first = torch.rand(5, 2), torch.ones(5, dtype=torch.bool)
    outputs = [each.unroll(obs, first, each.lstm.cell.initial(5))[0] for each in (policy, plain)]
    torch.testing.assert_close(outputs[0].values, outputs[1].values * 20 - 100)
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert float(policy.value_scale) == pytest.approx(20)


def test_policies_written_by_hand_read_normalized_numbers():
    world = holdfast.make_world("gym:CartPole-v1", agents=5)
    name = f"{NewLSTMPolicy.__module__}:{NewLSTMPolicy.__name__}"
    policies = [holdfast.make_policy(name, world, seed=0, normalize_obs=on, normalize_value=on) for on in (True, False)]
    policy = policies[0]
    obs, mean, first = torch.rand(5, 4), torch.tensor([1.0, 2, 3, 4]), torch.ones(5, dtype=torch.bool)
    stats = policy.obs_norm.stats[0]
    stats.mean.copy_(mean)
    stats.var.fill_(4)
    policy.value_norm.mean.fill_(-100)
    policy.value_norm.var.fill_(400)
    inputs = [policy_td({"env_obs": numbers, "first": first}, start=0) for numbers in (obs, (obs - mean) / 2)]
    action = torch.zeros(5, dtype=torch.long)
    outputs = [each(td, action=action) for each, td in zip(policies, inputs, strict=True)]
    torch.testing.assert_close(outputs[0]["full_log_probs"], outputs[1]["full_log_probs"])
    torch.testing.assert_close(outputs[0]["values"], outputs[1]["values"] * 20 - 100)
    assert torch.equal(outputs[0]["env_obs"], obs)
    assert set(outputs[0].keys()) == set(outputs[1].keys())
    for each, td in zip(policies, inputs, strict=True):
        each(td=td, action=action)
    torch.testing.assert_close(outputs[0]["values"], outputs[1]["values"] * 20 - 100)
    # The statistics of a copy are its own.
    laws = holdfast.check(policy, world)
    assert {law: result.finding for law, result in laws.items() if not result.ok} == {}
