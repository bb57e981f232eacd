"""A shard of a world gives the steps of the same agents in the whole world."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import rng
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.errors import ConfigError, ContractError
from holdfast.worlds import make_world
from holdfast.worlds.step import Shardable, select

FLAGS = ("reward", "terminated", "truncated", "first", "valid", "trial")


def acts(spec, agent, clock):
    return rng.randint(len(spec.action_names), 5, rng.STREAM_ACTION, agent, clock)


def assert_same(shard, full_step, rows):
    expected = select(full_step, rows)
    for name in FLAGS:
        assert getattr(shard, name).equal(getattr(expected, name)), name
    for name in ("obs", "last_obs"):
        obs, expected_obs = getattr(shard, name), getattr(expected, name)
        assert (obs is None) == (expected_obs is None)
        assert obs is None or bool((obs == expected_obs).all())


def assert_shard_equals_whole(name, agents, first, count, *, seed=4, steps=40, **options):
    full_world = make_world(name, agents, seed=seed, **options)
    shard = make_world(name, count, seed=seed, **options)
    assert isinstance(shard, Shardable)
    shard.set_agent_offset(first)
    rows = torch.arange(first, first + count)
    whole_step, shard_step = full_world.reset(), shard.reset()
    for clock in range(steps):
        assert_same(shard_step, whole_step, rows)
        whole_step = full_world.step(acts(full_world.spec, torch.arange(agents), clock))
        shard_step = shard.step(acts(shard.spec, rows, clock))


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(WORLD_CONFIGS)), data=st.data())
def test_shard_steps_equal_those_of_the_whole_world(name, data):
    agents_per_env = 24 if name == "arena" else 1
    envs = data.draw(st.integers(1, 4))
    first = data.draw(st.integers(0, envs - 1))
    count = data.draw(st.integers(1, envs - first))
    options = {"length": 12} if name == "arena" else {}
    assert_shard_equals_whole(name, agents_per_env * envs, agents_per_env * first, agents_per_env * count, **options)


def test_gym_shard_is_seeded_as_in_the_whole_world():
    assert_shard_equals_whole("gym:CartPole-v1", 6, 2, 3, steps=80)


def test_arena_shard_starts_at_an_environment():
    world = make_world("arena", 24)
    with pytest.raises(ConfigError, match="starts at a multiple of 24"):
        world.set_agent_offset(12)


def test_native_vector_env_cannot_be_a_shard():
    world = make_world("gym:CartPole-v1", 2, vector="native")
    with pytest.raises(ConfigError, match="takes one seed for all"):
        world.set_agent_offset(2)
    world.close()


def test_error_in_a_shard_names_the_global_agent():
    world = make_world("gym:CartPole-v1", 2)
    world.set_agent_offset(6)
    world.reset()
    world._vector._agent_envs[1].env.step = None
    with pytest.raises(ContractError, match="agent 7, step 1"):
        world.step(torch.zeros(2, dtype=torch.long))
    world.close()
