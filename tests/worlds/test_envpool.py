"""envpool's environments: told as the contract says, and every life the same at once and in turns."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.check import check_world
from holdfast.errors import ConfigError, ContractError
from holdfast.experience.turns import live_in_turns
from holdfast.unseen import at_once
from holdfast.which_world import EnvpoolKnobs
from holdfast.worlds import draws, make_world
from holdfast.worlds.envpool import pool
from holdfast.worlds.going_on import go_on, state_of
from holdfast.worlds.turns import CountsFrom, TakesTurns
from holdfast.worlds.watched import Watched, watched

envpool = pytest.importorskip("envpool")
# Installed where slow tests run: it is big.
pytestmark = pytest.mark.slow

FIELDS = ("obs", "reward", "terminated", "truncated", "first", "valid", "trial", "last_obs")
SHORT = {"max_episode_steps": 12}


def poles(agents=4, env="CartPole-v1", **options):
    return make_world(f"envpool:{env}", agents=agents, **{"options": SHORT, **options})


def same(one, other, rows=slice(None)):
    return all(torch.equal(getattr(one, name)[rows], getattr(other, name)) for name in FIELDS)


def drawn(steps, agents, seed=0):
    return torch.randint(2, (steps, agents), generator=torch.Generator().manual_seed(seed))


def test_the_row_of_an_end_is_dead_and_the_next_one_opens_an_episode():
    world = watched(poles(3))
    steps = [world.reset()] + [world.step(actions) for actions in drawn(40, 3)]
    assert steps[0].first.all()
    assert steps[0].valid.all()
    ended = torch.stack([step.terminated | step.truncated for step in steps])
    first, valid = (torch.stack([getattr(step, name) for step in steps]) for name in ("first", "valid"))
    reward = torch.stack([step.reward for step in steps])
    assert ended.sum() >= 6
    assert torch.equal(valid, ~ended)
    assert torch.equal(first[1:], ended[:-1])
    assert torch.equal(reward, (~first).float())
    assert all(torch.equal(step.obs, step.last_obs) for step in steps)
    world.world.close()


def test_a_life_is_that_of_an_environment_made_with_its_seed_alone():
    world, actions = poles(3, seed=5), drawn(30, 3)
    seeds = draws.below(1 << 31, 5, draws.STREAM_WORLD, torch.arange(3), 0).tolist()
    alone = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[seeds[1]], **SHORT)
    with pytest.warns(UserWarning, match="precision lowered"):
        seen, _ = alone.reset()
    assert np.array_equal(world.reset().obs[1:2].numpy(), seen)
    for taken in actions:
        step, (seen, reward, *ends, _) = world.step(taken), alone.step(taken[1:2].numpy())
        told = step.obs[1:2].numpy(), *(getattr(step, name)[1:2] for name in FIELDS[1:4])
        assert all(np.array_equal(a, b) for a, b in zip(told, (seen, reward, *ends), strict=True))


def test_nobody_feels_how_many_others_there_are_and_a_reset_is_the_first_again():
    few, many, actions = poles(2, seed=3), poles(5, seed=3), drawn(30, 5)
    first = many.reset()
    assert same(first, few.reset(), slice(2))
    for taken in actions:
        assert same(many.step(taken), few.step(taken[:2]), slice(2))
    assert same(many.reset(), first)
    assert not torch.equal(poles(5, seed=4).reset().obs, first.obs)


def by_agent(world, length, actions):
    """Live in turns; return what every agent was told, one after the other."""
    told, pending, sizes = [[] for _ in range(world.agents)], world.reset(), []

    def hear():
        turn = world.turn()
        for place, row in enumerate(turn.rows.tolist()):
            told[row].append([getattr(turn.step, name)[place] for name in FIELDS])
        return turn

    for rollout in range(2):

        def answer(turn, when, begun=rollout * length):
            sizes.append(len(turn.rows))
            world.answer(turn.rows, actions[begun + when, turn.rows])

        pending = live_in_turns(world.shares, pending, length, answer, hear)
    return told, pending, sizes


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(0, 3), st.integers(1, 3))
def test_in_turns_everybody_lives_as_all_at_once(batch, batches, length, seed, threads):
    agents = batch * batches
    actions = drawn(2 * length, agents, seed)
    world, together = (
        poles(agents, seed=seed, **how)
        for how in ({"vector": "async", "batch": batch, "threads": threads}, {})
    )
    assert isinstance(world, TakesTurns)
    assert not isinstance(together, TakesTurns)
    assert [share.tolist() for share in world.shares] == torch.arange(agents).view(-1, batch).tolist()
    told, pending, sizes = by_agent(watched(world), length, actions)
    assert max(sizes) <= batch
    together.reset()
    for at, taken in enumerate(actions):
        step = together.step(taken)
        for agent in range(agents):
            assert all(
                torch.equal(a, getattr(step, name)[agent])
                for a, name in zip(told[agent][at], FIELDS, strict=True)
            )
    assert same(step, pending)
    for each in (world, together):
        each.close()


@pytest.mark.parametrize("env", ["Pendulum-v1", "MiniGrid-Empty-5x5-v0", "FrozenLake-v1"])
@pytest.mark.parametrize("batch", [2, 4])
def test_fewer_than_a_batch_are_never_waited_for_whatever_the_spaces(env, batch):
    world, together = (poles(4, env, **how) for how in ({"vector": "async", "batch": batch}, {}))
    box = isinstance(world.spec.action, spaces.Box)
    world.reset()
    together.reset()
    dice = torch.Generator().manual_seed(0)
    for _ in range(20):
        actions = 4 * torch.rand(4, 1, generator=dice) - 2 if box else torch.randint(3, (4,), generator=dice)
        world.answer(torch.tensor([2]), actions[2:3])
        turn = world.turn()
        assert turn.rows.tolist() == [2]
        # The others one by one, too.
        rest = []
        for row in (0, 1, 3):
            world.answer(torch.tensor([row]), actions[row : row + 1])
            rest.append(world.turn())
        other = together.step(actions)
        for each in (turn, *rest):
            row = int(each.rows)
            assert bool((each.step.obs[0] == other.obs[row]).all())
            assert each.step.reward[0] == other.reward[row]


def test_all_are_waited_for_in_a_step_and_none_twice():
    world = poles(4, vector="async", batch=2)
    with pytest.raises(ContractError, match=r"Call reset\(\) before the first step"):
        world.step(torch.zeros(4, dtype=torch.long))
    with pytest.raises(ContractError, match=r"Call reset\(\) before state"):
        world.state()
    world.reset()
    with pytest.raises(ContractError, match="nobody acts, so nothing comes of it; answer somebody first"):
        world.turn()
    world.answer(torch.tensor([1, 3]), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ContractError, match="agent 3 was answered and acts already; wait for it"):
        world.answer(torch.tensor([0, 3]), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ContractError, match="agent 1 was answered and acts already"):
        world.step(torch.zeros(4, dtype=torch.long))
    with pytest.raises(ContractError, match="agent 0 took action 2"):
        world.answer(torch.tensor([0]), torch.tensor([2]))
    rows = world.turn().rows.tolist()
    while len(rows) < 2:
        rows += world.turn().rows.tolist()
    assert sorted(rows) == [1, 3]
    assert len(world.step(torch.zeros(4, dtype=torch.long)).reward) == 4


def test_numbers_kept_and_what_is_shown_beside():
    world = poles(2, keep=(0, 2), previous_action=True, vector="async")
    assert not isinstance(world, TakesTurns)
    whole = poles(2).reset().obs
    assert torch.equal(world.reset().obs["obs"], whole[:, [0, 2]])
    step = world.step(torch.tensor([0, 1]))
    assert step.obs["previous_action"].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_who_goes_on_begins_an_episode_that_was_not_lived_yet(vector):
    one, other = (watched(poles(4, vector=vector, seed=2)) for _ in range(2))
    begun = one.reset()
    pending = one.step(torch.zeros(4, dtype=torch.long))
    state = state_of(one)
    step, anew = go_on(other, state, pending)
    assert anew.who.all()
    assert anew.why == "envpool:CartPole-v1 cannot say where its environments are"
    assert step.first.all()
    assert not torch.equal(step.obs, begun.obs)
    again, _ = go_on(one, state, pending)
    assert torch.equal(again.obs, step.obs)
    assert not other.step(torch.zeros(4, dtype=torch.long)).first.any()
    with pytest.raises(ContractError, match="it was saved with seed=2, and this has seed=3"):
        poles(4, seed=3).restore(state["world"])


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"env": "CartPole-v9"}, r"envpool has no such environment; did you mean CartPole-v\d\?"),
        ({"env": "zzzzzzzzzzzz"}, r"has no such environment; it has 1,\d+; envpool.list_all_envs\(\) lists"),
        ({"options": {"gravitas": 1}}, "envpool:CartPole-v1 cannot be made: .*gravitas"),
        ({"options": {"num_envs": 9}}, "world.options has num_envs; write world.agents=9 instead"),
        ({"options": {"seed": 3}}, "world.options has seed; write seed=3 instead"),
        ({"options": {"max_num_players": 2}}, "has several players"),
        ({"vector": "async", "batch": 3}, "world.batch=3 does not divide world.agents=4; give one of 1, 2"),
        ({"batch": 2}, "world.batch=2 goes with world.vector=async; leave it out"),
        ({"agents": 0}, "world.agents=0: there must be at least 1"),
        ({"keep": (4,)}, "world.keep=4: the numbers shown are 0 to 3"),
        ({"autoreset": "x"}, "has no option 'autoreset'"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_to_type(call, told):
    with pytest.raises(ConfigError, match=told):
        poles(**call)


@pytest.mark.usefixtures("annotations_asleep")
def test_a_way_that_is_none_is_told():
    with pytest.raises(ConfigError, match=r"world.vector=native: give one of sync, async"):
        poles(vector="native")


def test_without_the_package_its_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"envpool is not installed; pip install 'holdfast\[envpool\]'"):
        poles()


def test_a_pool_is_made_with_what_was_asked_for_and_those_that_nobody_sees(monkeypatch):
    asked, make = [], envpool.make_gymnasium
    monkeypatch.setattr(envpool, "make_gymnasium", lambda *a, **o: asked.append(o) or make(*a, **o))
    poles(4, threads=3, vector="async", batch=2)
    poles(4)
    names = ("num_envs", "batch_size", "num_threads", "max_episode_steps")
    assert [[each[name] for name in names] for each in asked] == [[5, 2, 3, 12], [4, 4, 0, 12]]


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Box(1, 2, (2,), np.float32), [1, 1]),
        (spaces.Box(-1, 1, (1,), np.float32), [0]),
        (spaces.Discrete(3, start=4), 4),
    ],
)
def test_who_is_not_seen_does_what_can_be_done(space, action):
    (resting,) = pool._resting(space)
    assert resting.tolist() == action
    assert space.contains(resting)


def test_half_of_the_agents_are_answered_at_once_where_nobody_says_how_many():
    assert [len(share) for share in poles(6, vector="async").shares] == [3, 3]
    assert [len(share) for share in poles(1, vector="async").shares] == [1]


def test_it_is_no_share_of_a_bigger_world():
    assert not isinstance(poles(2), CountsFrom)
    assert not isinstance(poles(2, vector="async"), CountsFrom)


def test_it_is_evaluated_all_at_once():
    knobs = EnvpoolKnobs(name="envpool:CartPole-v1", vector="async", batch=8, agents=16)
    there = at_once(knobs)
    assert (there.vector, there.batch, there.agents) == ("sync", 0, 16)


def test_nothing_is_paid_for_an_action_that_was_not_taken(monkeypatch):
    world = poles(2)
    receive = type(world._pool).receive
    monkeypatch.setattr(type(world._pool), "receive", lambda pool: replace(receive(pool), reward=np.ones(2)))
    steps = [world.reset()] + [world.step(actions) for actions in drawn(20, 2)]
    first, reward = (torch.stack([getattr(step, name) for step in steps]) for name in ("first", "reward"))
    assert torch.equal(reward, (~first).float())
    assert first[1:].any()


def test_a_world_that_is_reset_where_an_episode_ended_begins_as_any():
    world = poles(2, options={"max_episode_steps": 3})
    begun = world.reset()
    for _ in range(3):
        step = world.step(torch.zeros(2, dtype=torch.long))
    assert step.truncated.all()
    assert same(world.reset(), begun)
    assert not world.step(torch.zeros(2, dtype=torch.long)).first.any()


def test_what_is_not_in_its_space_is_told_with_agent_and_step(monkeypatch):
    world = poles(2, "FrozenLake-v1", options={})
    world.reset()
    receive = type(world._pool).receive

    def wrong(pool):
        told = receive(pool)
        told.obs[told.rows == 1] = 99
        return told

    monkeypatch.setattr(type(world._pool), "receive", wrong)
    with pytest.raises(
        ContractError, match=r"envpool:FrozenLake-v1, agent 1, step 1: observation is 99; its"
    ):
        world.step(torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("how", [{}, {"vector": "async", "batch": 6}])
def test_the_contract_is_kept(how):
    laws = check_world("envpool:CartPole-v1", options={"max_episode_steps": 9}, steps=60, **how)
    assert laws.ok, laws


def test_a_guard_takes_turns_as_its_world_does():
    world = watched(poles(4, vector="async", batch=2))
    assert isinstance(world, Watched)
    assert isinstance(world, TakesTurns)
