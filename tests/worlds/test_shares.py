"""A share of a world lives as these agents do in the whole."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import ConfigError, ContractError
from holdfast.worlds import WORLDS, draws, make_world
from holdfast.worlds.turns import CountsFrom, picked

FLAGS = ("reward", "terminated", "truncated", "first", "valid", "trial")


def acts(spec, agent, clock):
    return draws.below(len(spec.action_names), 5, draws.STREAM_ACTION, agent, clock)


def assert_same(share, whole, rows):
    mine = picked(whole, rows)
    for name in FLAGS:
        assert getattr(share, name).equal(getattr(mine, name)), name
    for name in ("obs", "last_obs"):
        part, all_of_it = getattr(share, name), getattr(mine, name)
        assert (part is None) == (all_of_it is None)
        assert part is None or bool((part == all_of_it).all())


def assert_a_share_lives_as_in_the_whole(name, agents, first, count, *, seed=4, steps=40, **options):
    whole = make_world(name, agents, seed=seed, **options)
    share = make_world(name, count, seed=seed, **options)
    assert isinstance(share, CountsFrom)
    share.count_from(first)
    rows = torch.arange(first, first + count)
    told, mine = whole.reset(), share.reset()
    for clock in range(steps):
        assert_same(mine, told, rows)
        told = whole.step(acts(whole.spec, torch.arange(agents), clock))
        mine = share.step(acts(share.spec, rows, clock))


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(sorted(WORLDS)), data=st.data())
def test_a_share_lives_as_these_agents_do_in_the_whole(name, data):
    crowd = 24 if name == "arena" else 1
    crowds = data.draw(st.integers(1, 4))
    first = data.draw(st.integers(0, crowds - 1))
    count = data.draw(st.integers(1, crowds - first))
    options = {"length": 12} if name == "arena" else {}
    assert_a_share_lives_as_in_the_whole(name, crowd * crowds, crowd * first, crowd * count, **options)


def test_a_share_of_environments_is_seeded_as_in_the_whole():
    assert_a_share_lives_as_in_the_whole("gym:CartPole-v1", 6, 2, 3, steps=80)


def test_a_share_of_arena_begins_with_a_crowd():
    world = make_world("arena", 24)
    with pytest.raises(ConfigError, match="begins with a crowd of 24"):
        world.count_from(12)


def test_environments_with_one_seed_for_all_are_no_share():
    world = make_world("gym:CartPole-v1", 2, vector="native")
    with pytest.raises(ConfigError, match="takes one seed for all"):
        world.count_from(2)
    world.close()


def test_an_error_in_a_share_names_the_agent_of_the_whole():
    world = make_world("gym:CartPole-v1", 2)
    world.count_from(6)
    world.reset()
    inside = world._vector._numbered[1]
    inside.env.step = None
    with pytest.raises(ContractError, match="agent 7, step 1"):
        world.step(torch.zeros(2, dtype=torch.long))
    world.close()
