"""EnvpoolWorld: flags of the contract, and equal steps in sync and async mode."""

import sys

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import rng
from holdfast.check import check_world
from holdfast.config.worlds import EnvpoolConfig
from holdfast.errors import ConfigError, ContractError
from holdfast.evaluation.held_out import force_sync
from holdfast.rollout.collector import async_groups
from holdfast.worlds import closing_world, make_world
from holdfast.worlds import envpool as adapter
from holdfast.worlds.checked_world import CheckedWorld, checked
from holdfast.worlds.save_restore import resume_world, save_world
from holdfast.worlds.step import AsyncWorld, Shardable

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


def test_row_of_an_end_is_invalid_and_the_next_is_first():
    world = checked(poles(3))
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


def test_steps_equal_those_of_an_env_made_with_the_seed():
    world, actions = poles(3, seed=5), drawn(30, 3)
    seeds = rng.randint(1 << 31, 5, rng.STREAM_WORLD, torch.arange(3), 0).tolist()
    env = envpool.make_gymnasium("CartPole-v1", num_envs=1, seed=[seeds[1]], **SHORT)
    with pytest.warns(UserWarning, match="precision lowered"):
        obs, _ = env.reset()
    assert np.array_equal(world.reset().obs[1:2].numpy(), obs)
    for row in actions:
        step, (obs, reward, *ends, _) = world.step(row), env.step(row[1:2].numpy())
        outputs = step.obs[1:2].numpy(), *(getattr(step, name)[1:2] for name in FIELDS[1:4])
        assert all(np.array_equal(a, b) for a, b in zip(outputs, (obs, reward, *ends), strict=True))


def test_steps_do_not_depend_on_the_number_of_agents_and_reset_repeats():
    few, many, actions = poles(2, seed=3), poles(5, seed=3), drawn(30, 5)
    first = many.reset()
    assert same(first, few.reset(), slice(2))
    for row in actions:
        assert same(many.step(row), few.step(row[:2]), slice(2))
    assert same(many.reset(), first)
    assert not torch.equal(poles(5, seed=4).reset().obs, first.obs)


def by_agent(world, length, actions):
    """Step asynchronously; return the steps of every agent, in order."""
    steps, pending, sizes = [[] for _ in range(world.agents)], world.reset(), []

    def recv():
        partial = world.recv()
        for index, row in enumerate(partial.rows.tolist()):
            steps[row].append([getattr(partial.step, name)[index] for name in FIELDS])
        return partial

    def rollout(start, next_step):
        groups = async_groups(world.groups, next_step, length, recv)
        while True:
            try:
                group = next(groups)
            except StopIteration as stop:
                return stop.value
            sizes.append(len(group.agent_ids))
            world.send(group.agent_ids, actions[start + group.t, group.agent_ids])

    for number in range(2):
        pending = rollout(number * length, pending)
    return steps, pending, sizes


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 12), st.integers(0, 3), st.integers(1, 3))
def test_async_steps_equal_sync_steps(batch, batches, length, seed, threads):
    agents = batch * batches
    actions = drawn(2 * length, agents, seed)
    world, together = (
        poles(agents, seed=seed, **how) for how in ({"vector": "async", "batch": batch, "threads": threads}, {})
    )
    assert isinstance(world, AsyncWorld)
    assert not isinstance(together, AsyncWorld)
    assert [group.tolist() for group in world.groups] == torch.arange(agents).view(-1, batch).tolist()
    steps, pending, sizes = by_agent(checked(world), length, actions)
    assert max(sizes) <= batch
    together.reset()
    for at, row in enumerate(actions):
        step = together.step(row)
        for agent in range(agents):
            assert all(
                torch.equal(a, getattr(step, name)[agent]) for a, name in zip(steps[agent][at], FIELDS, strict=True)
            )
    assert same(step, pending)
    world.close()
    together.close()


@pytest.mark.parametrize("env", ["Pendulum-v1", "MiniGrid-Empty-5x5-v0", "FrozenLake-v1"])
@pytest.mark.parametrize("batch", [2, 4])
def test_recv_returns_fewer_than_a_batch(env, batch):
    world, together = (poles(4, env, **how) for how in ({"vector": "async", "batch": batch}, {}))
    box = isinstance(world.spec.action, spaces.Box)
    world.reset()
    together.reset()
    dice = torch.Generator().manual_seed(0)
    for _ in range(20):
        actions = 4 * torch.rand(4, 1, generator=dice) - 2 if box else torch.randint(3, (4,), generator=dice)
        world.send(torch.tensor([2]), actions[2:3])
        partial = world.recv()
        assert partial.rows.tolist() == [2]
        # The rest one by one, too.
        rest = []
        for row in (0, 1, 3):
            world.send(torch.tensor([row]), actions[row : row + 1])
            rest.append(world.recv())
        other = together.step(actions)
        for received in (partial, *rest):
            row = int(received.rows)
            assert bool((received.step.obs[0] == other.obs[row]).all())
            assert received.step.reward[0] == other.reward[row]


def test_step_waits_for_all_agents_and_send_rejects_busy_ones():
    world = poles(4, vector="async", batch=2)
    with pytest.raises(ContractError, match=r"Call reset\(\) before the first step"):
        world.step(torch.zeros(4, dtype=torch.long))
    with pytest.raises(ContractError, match=r"Call reset\(\) before state"):
        world.state()
    world.reset()
    with pytest.raises(ContractError, match=r"no agent is stepping; call send\(\) before recv"):
        world.recv()
    world.send(torch.tensor([1, 3]), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ContractError, match=r"agent 3 is still stepping; call recv\(\) before send"):
        world.send(torch.tensor([0, 3]), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ContractError, match="agent 1 is still stepping"):
        world.step(torch.zeros(4, dtype=torch.long))
    with pytest.raises(ContractError, match="agent 0 took action 2"):
        world.send(torch.tensor([0]), torch.tensor([2]))
    rows = world.recv().rows.tolist()
    while len(rows) < 2:
        rows += world.recv().rows.tolist()
    assert sorted(rows) == [1, 3]
    assert len(world.step(torch.zeros(4, dtype=torch.long)).reward) == 4


def test_keep_and_previous_inputs_of_envpool():
    world = poles(2, keep=(0, 2), previous_action=True, vector="async")
    assert not isinstance(world, AsyncWorld)
    full_obs = poles(2).reset().obs
    assert torch.equal(world.reset().obs["obs"], full_obs[:, [0, 2]])
    step = world.step(torch.tensor([0, 1]))
    assert step.obs["previous_action"].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize("vector", ["sync", "async"])
def test_resume_starts_new_episodes(vector):
    one, other = (checked(poles(4, vector=vector, seed=2)) for _ in range(2))
    begun = one.reset()
    pending = one.step(torch.zeros(4, dtype=torch.long))
    state = save_world(one)
    step, restarted = resume_world(other, state, pending)
    assert restarted.mask.all()
    assert restarted.reason == "envpool:CartPole-v1 cannot save the state of its environments"
    assert step.first.all()
    assert not torch.equal(step.obs, begun.obs)
    again, _ = resume_world(one, state, pending)
    assert torch.equal(again.obs, step.obs)
    assert not other.step(torch.zeros(4, dtype=torch.long)).first.any()
    with pytest.raises(ContractError, match="it was saved with seed=2, and this has seed=3"):
        poles(4, seed=3).restore(state["world"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"env": "CartPole-v9"}, r"envpool has no such environment; did you mean CartPole-v\d\?"),
        ({"env": "zzzzzzzzzzzz"}, r"has no such environment; it has 1,\d+; envpool.list_all_envs\(\) lists"),
        ({"options": {"gravitas": 1}}, "envpool:CartPole-v1 cannot be made: .*gravitas"),
        ({"options": {"num_envs": 9}}, "world.options has num_envs; write world.agents=9 instead"),
        ({"options": {"seed": 3}}, "world.options has seed; write seed=3 instead"),
        ({"options": {"max_num_players": 2}}, "has several players"),
        ({"vector": "async", "batch": 3}, "world.batch=3 does not divide world.agents=4; give one of 1, 2"),
        ({"batch": 2}, "world.batch=2 needs world.vector=async; leave it out"),
        ({"agents": 0}, "world.agents=0: there must be at least 1"),
        ({"keep": (4,)}, "world.keep=4: the indices are 0 to 3"),
        ({"autoreset": "x"}, "has no option 'autoreset'"),
    ],
)  # fmt: skip
def test_config_errors_of_envpool_say_what_to_type(call, message):
    with pytest.raises(ConfigError, match=message):
        poles(**call)


@pytest.mark.usefixtures("annotations_asleep")
def test_invalid_vector_mode_is_rejected():
    with pytest.raises(ConfigError, match=r"world.vector=native: give one of sync, async"):
        poles(vector="native")


def test_missing_envpool_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"envpool is not installed; .*pip install .*\[envpool\]'"):
        poles()


def test_envpool_options_with_padding_envs(monkeypatch):
    options, make = [], envpool.make_gymnasium
    monkeypatch.setattr(envpool, "make_gymnasium", lambda *a, **o: options.append(o) or make(*a, **o))
    poles(4, threads=3, vector="async", batch=2)
    poles(4)
    names = ("num_envs", "batch_size", "num_threads", "max_episode_steps")
    assert [[call[name] for name in names] for call in options] == [[5, 2, 3, 12], [4, 4, 0, 12]]


@pytest.mark.parametrize(
    ("space", "action"),
    [
        (spaces.Box(1, 2, (2,), np.float32), [1, 1]),
        (spaces.Box(-1, 1, (1,), np.float32), [0]),
        (spaces.Discrete(3, start=4), 4),
    ],
)
def test_no_op_action_is_in_the_space(space, action):
    (no_op,) = adapter._no_op(space)
    assert no_op.tolist() == action
    assert space.contains(no_op)


def test_default_batch_is_half_of_the_agents():
    assert [len(group) for group in poles(6, vector="async").groups] == [3, 3]
    assert [len(group) for group in poles(1, vector="async").groups] == [1]


def test_envpool_world_is_not_shardable():
    assert not isinstance(poles(2), Shardable)
    assert not isinstance(poles(2, vector="async"), Shardable)


def test_evaluation_is_sync():
    config = EnvpoolConfig(name="envpool:CartPole-v1", vector="async", batch=8, agents=16)
    evaluated = force_sync(config)
    assert (evaluated.vector, evaluated.batch, evaluated.agents) == ("sync", 0, 16)


def test_reward_of_a_reset_row_is_zero(monkeypatch):
    world = poles(2)
    receive = adapter.EnvpoolEnvs.receive

    def rewarded(envs):
        rows, obs, _, *ends = receive(envs)
        return rows, obs, np.ones(2), *ends

    monkeypatch.setattr(adapter.EnvpoolEnvs, "receive", rewarded)
    steps = [world.reset()] + [world.step(actions) for actions in drawn(20, 2)]
    first, reward = (torch.stack([getattr(step, name) for step in steps]) for name in ("first", "reward"))
    assert torch.equal(reward, (~first).float())
    assert first[1:].any()


def test_reset_after_an_end():
    world = poles(2, options={"max_episode_steps": 3})
    begun = world.reset()
    for _ in range(3):
        step = world.step(torch.zeros(2, dtype=torch.long))
    assert step.truncated.all()
    assert same(world.reset(), begun)
    assert not world.step(torch.zeros(2, dtype=torch.long)).first.any()


def test_observation_outside_its_space_names_agent_and_step(monkeypatch):
    world = poles(2, "FrozenLake-v1", options={})
    world.reset()
    receive = adapter.EnvpoolEnvs.receive

    def wrong(envs):
        rows, obs, *rest = receive(envs)
        obs[rows == 1] = 99
        return rows, obs, *rest

    monkeypatch.setattr(adapter.EnvpoolEnvs, "receive", wrong)
    with pytest.raises(ContractError, match=r"envpool:FrozenLake-v1, agent 1, step 1: observation is 99; its"):
        world.step(torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize("how", [{}, {"vector": "async", "batch": 6}])
def test_envpool_passes_check_world(how):
    laws = check_world("envpool:CartPole-v1", options={"max_episode_steps": 9}, steps=60, **how)
    assert laws.ok, laws


def test_checked_async_world_is_async():
    world = checked(poles(4, vector="async", batch=2))
    assert isinstance(world, CheckedWorld)
    assert isinstance(world, AsyncWorld)


@pytest.mark.parametrize("inputs", [{}, {"tell_first": True}, {"vector": "async"}])
def test_close_closes_the_pool(monkeypatch, inputs):
    with closing_world(poles(2, **inputs)) as world:
        world.reset()
        # Only the last one: making the environments again closes the old ones.
        closed, close = [], adapter.EnvpoolEnvs.close
        monkeypatch.setattr(adapter.EnvpoolEnvs, "close", lambda self: closed.append(1) or close(self))
    assert closed == [1]
