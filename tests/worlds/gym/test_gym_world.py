"""GymWorld: all autoreset modes give the transitions of the environments."""

import os
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.gym_envs import (
    BOTH,
    MODES,
    TERMINATED,
    TRUNCATED,
    Counting,
    counting,
    env_transitions,
    seed_of,
    world_transitions,
)
from helpers.play_world import ALL, live
from holdfast import make_policy
from holdfast.errors import ContractError
from holdfast.learn import replay
from holdfast.rollout import Collector
from holdfast.worlds import World
from holdfast.worlds.gym import GymWorld, gym_world
from holdfast.worlds.gym.gym_world import VectorEnvWorld

ENDS = st.sampled_from([TERMINATED, TRUNCATED, BOTH])
SCRIPT = st.lists(st.tuples(st.integers(1, 4), ENDS), min_size=1, max_size=4)
SCRIPTS = [
    [(1, TERMINATED), (3, TRUNCATED)],
    [(2, BOTH), (1, TRUNCATED), (1, BOTH)],
    [(5, TRUNCATED), (2, TERMINATED)],
]


def some_actions(agents, steps, count=3):
    return np.random.default_rng(7).integers(0, count, (agents, steps))


def matches_envs(world, make_env, calls, seed, count=3):
    """Whether each agent of a world gets the transitions of its environment, stepped directly."""
    actions = some_actions(world.agents, calls, count)
    return all(
        len(rows) > calls // 2 - 1
        and rows == env_transitions(make_env(agent), seed_of(seed, agent), actions[agent][: len(rows)])
        for agent, rows in enumerate(world_transitions(world, calls, actions))
    )


@settings(max_examples=40)
@given(st.lists(SCRIPT, min_size=1, max_size=4), st.sampled_from(MODES), st.integers(-5, 5))
def test_every_autoreset_mode_gives_the_env_transitions(scripts, mode, seed):
    world = GymWorld(len(scripts), env=counting(*scripts), autoreset=mode, seed=seed)
    assert matches_envs(world, lambda agent: Counting(agent, scripts[agent]), 14, seed)


@pytest.mark.parametrize("mode", MODES)
def test_cartpole_transitions_are_equal_in_every_autoreset_mode(mode):
    world = GymWorld(5, env="CartPole-v1", autoreset=mode, seed=-3)
    assert matches_envs(world, lambda _: gymnasium.make("CartPole-v1"), 120, -3, 2)


@pytest.mark.parametrize("mode", MODES)
def test_time_limit_truncation_has_the_final_obs(mode):
    options = {"max_episode_steps": 7}
    world = GymWorld(3, env="CartPole-v1", autoreset=mode, options=options)
    assert matches_envs(world, lambda _: gymnasium.make("CartPole-v1", **options), 40, 0, 2)


@pytest.mark.parametrize("mode", MODES)
def test_flags_of_every_autoreset_mode(mode):
    world = GymWorld(3, env=counting(*SCRIPTS), autoreset=mode)
    assert isinstance(world, World)
    steps = live(world, 20, lambda obs, first: torch.ones(3, dtype=torch.long))
    assert world.spec.truncates == "always"
    dead = torch.zeros(3, dtype=torch.bool)
    for step in steps:
        ended = step.terminated | step.truncated
        assert torch.equal(step.valid, ~ended if mode == "next_step" else torch.ones(3, dtype=torch.bool))
        if step is not steps[0]:
            assert torch.equal(step.first, dead if mode == "next_step" else ended)
            assert not step.reward[step.first & step.valid & ~ended].any()
        dead = ended
        assert step.last_obs is not None
        assert (step.reward.dtype, step.obs.dtype) == (torch.float32, torch.float32)
        assert not step.trial.any()
    assert bool(steps[0].first.all() & steps[0].valid.all())
    assert not (steps[0].terminated | steps[0].truncated).any()
    assert not steps[0].reward.any()


SPLIT_LAST_OBS, EPISODE_STARTS = VectorEnvWorld._split_last_obs, gym_world.episode_starts


def last_is_next(self, *args):
    obs, _ = SPLIT_LAST_OBS(self, *args)
    return obs, obs


def next_is_last(self, *args):
    _, last_obs = SPLIT_LAST_OBS(self, *args)
    return last_obs, last_obs


def first_late():
    previous = []

    def starts(*args):
        previous.append(EPISODE_STARTS(*args))
        return previous[-2] if len(previous) > 1 else np.zeros_like(previous[0])

    return starts


def first_early(previous_ended, ended, agents):
    return ended


@pytest.mark.parametrize(
    ("mode", "owner", "name", "wrong"),
    [
        ("same_step", VectorEnvWorld, "_split_last_obs", last_is_next),
        ("disabled", VectorEnvWorld, "_split_last_obs", last_is_next),
        ("disabled", VectorEnvWorld, "_split_last_obs", next_is_last),
        ("next_step", gym_world, "episode_starts", first_late()),
        ("next_step", gym_world, "episode_starts", first_early),
    ],
)
def test_sabotaged_autoreset_is_detected(monkeypatch, mode, owner, name, wrong):
    scripts = [[(2, TRUNCATED), (3, TERMINATED)]]
    matches = []
    for _ in range(2):
        world = GymWorld(2, env=counting(*scripts), autoreset=mode)
        matches.append(matches_envs(world, lambda agent: Counting(agent, scripts[0]), 14, 0))
        monkeypatch.setattr(owner, name, wrong)
    assert matches == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_episode_lengths_count_valid_steps_only(mode):
    scripts = [[(1, TERMINATED), (4, TRUNCATED)], [(3, BOTH)]]
    world = GymWorld(2, env=counting(*scripts), autoreset=mode)
    policy = make_policy("auto", world, seed=0, hidden_size=8, num_layers=1)
    collector = Collector(world, policy, length=60, horizon=6, seed=0)
    segments = collector.rollout(0)
    lengths = collector.episodes.pop()
    # 60 calls are a whole number of script cycles in every mode, except for the last one.
    assert 2.6 <= lengths["charts/episodic_length"] <= 3.0
    assert bool(segments.steps["valid"].all()) == (mode != "next_step")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inputs", [{}, {"previous_action": True, "previous_reward": True}])
def test_replay_matches_rollout_in_every_autoreset_mode(mode, inputs):
    world = GymWorld(6, env="CartPole-v1", autoreset=mode, keep=(0, 2), **inputs)
    policy = make_policy("auto", world, seed=0, hidden_size=16, num_layers=1)
    with torch.no_grad():
        torch.manual_seed(0)
        for weight in policy.parameters():
            weight += 0.2 * torch.randn_like(weight)
    collector = Collector(world, policy, length=128, horizon=16, seed=0)
    for version in range(2):
        segments = collector.rollout(version)
        with torch.no_grad():
            again = replay(policy, segments)
        valid = segments.steps["valid"]
        assert bool(valid.all()) == (mode != "next_step")
        assert segments.steps["act_log_prob"][valid].std() > 0.05
        for key in ("act_log_prob", "values"):
            recorded = segments.steps[key][valid]
            error = (again[key][valid] - recorded).abs() / recorded.abs().clamp(min=1)
            assert float(error.max()) <= 1e-5


def test_reset_repeats_the_first_episodes():
    for mode in MODES:
        world = GymWorld(3, env="CartPole-v1", autoreset=mode, seed=4)
        one = live(world, 33, lambda obs, first: (obs[:, 0] > 0).long())
        other = live(world, 33, lambda obs, first: (obs[:, 0] > 0).long())
        for x, y in zip(one, other, strict=True):
            assert all(torch.equal(getattr(x, key), getattr(y, key)) for key in (*ALL, "last_obs"))


def test_episodes_do_not_depend_on_the_number_of_agents():
    def play(agents, seed):
        world = GymWorld(agents, env="CartPole-v1", seed=seed)
        return live(world, 40, lambda obs, first: (obs[:, 1] > 0).long())

    for x, y in zip(play(2, 10**30), play(5, 10**30), strict=True):
        assert all(torch.equal(getattr(x, key), getattr(y, key)[:2]) for key in ALL)
    starts = torch.cat([play(3, seed)[0].obs for seed in (0, 1, -1, 2**40)])
    assert len(starts.unique(dim=0)) == 12


def test_steps_are_not_overwritten_later():
    for mode in MODES:
        world = GymWorld(2, env=counting(*SCRIPTS), autoreset=mode)
        steps = [world.reset()]
        copies = [replace(steps[0], obs=steps[0].obs.clone(), last_obs=steps[0].last_obs.clone())]
        for _ in range(12):
            step = world.step(torch.ones(2, dtype=torch.long))
            steps.append(step)
            parts = {key: getattr(step, key).clone() for key in (*ALL, "last_obs")}
            copies.append(replace(step, **parts))
        for step, copy in zip(steps, copies, strict=True):
            assert all(torch.equal(getattr(step, key), getattr(copy, key)) for key in (*ALL, "last_obs"))


class Batched(SyncVectorEnv):
    """Returns final observations as a batch, as native vector environments do."""

    def step(self, actions):
        *rest, info = super().step(actions)
        if "final_obs" in info:
            rows = [np.zeros(2) if obs is None else obs for obs in info["final_obs"]]
            info["final_obs"] = np.stack(rows).astype(np.float32)
        return *rest, info


class Copying(Counting):
    """For an existing vector environment: observations are copies, and infos are empty."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {}

    def show(self, action):
        return super().show(action).copy()


@pytest.mark.parametrize("kind", [SyncVectorEnv, Batched])
def test_existing_vector_env_in_every_autoreset_mode(kind):
    makes = [lambda agent=agent: Copying(agent, SCRIPTS[agent]) for agent in range(3)]
    for mode in AutoresetMode:
        world = GymWorld(3, env=kind(makes, autoreset_mode=mode), seed=3)
        assert matches_envs(world, lambda agent: Copying(agent, SCRIPTS[agent]), 14, 3)


def test_native_vector_env_has_next_step_autoreset():
    world = GymWorld(7, env="CartPole-v1", vector="native", seed=1, keep=(2, 0), options={"max_episode_steps": 9})
    steps = live(world, 60, lambda obs, first: (obs[:, 0] > 0).long())
    again = live(world, 60, lambda obs, first: (obs[:, 0] > 0).long())
    ended = torch.stack([step.terminated | step.truncated for step in steps])
    first, valid = (torch.stack([getattr(step, key) for step in steps]) for key in ("first", "valid"))
    assert ended.sum() > 20
    assert torch.equal(first[1:], ended[:-1])
    assert torch.equal(valid, ~ended)
    assert all(torch.equal(x.obs, y.obs) for x, y in zip(steps, again, strict=True))
    assert steps[0].obs.shape == (7, 2)
    rewards = torch.stack([step.reward for step in steps[1:]])
    assert torch.equal(rewards, (~first[1:]).float())


class Generous(SyncVectorEnv):
    """Gives a reward in reset rows, as native vector environments may do."""

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return obs, np.where(self._begins(), 7.0, reward), *rest

    def _begins(self):
        return np.array([env.age == 0 for env in self.envs])


def test_reward_of_a_reset_row_is_zero():
    makes = [lambda agent=agent: Copying(agent, SCRIPTS[agent]) for agent in range(3)]
    world = GymWorld(3, env=Generous(makes, autoreset_mode=AutoresetMode.NEXT_STEP), seed=3)
    steps = live(world, 14, lambda obs, first: torch.ones(3, dtype=torch.long))
    first, reward = (torch.stack([getattr(step, key) for step in steps]) for key in ("first", "reward"))
    assert first[1:].any()
    assert not reward[first].any()


def test_reset_after_an_end_cancels_the_pending_autoreset():
    world = GymWorld(1, env=counting([(2, TRUNCATED)]), autoreset="next_step")
    act = torch.zeros(1, dtype=torch.long)
    world.reset()
    world.step(act)
    assert bool(world.step(act).truncated)
    assert bool(world.reset().first)
    after = world.step(act)
    assert (bool(after.first), bool(after.valid)) == (False, True)


def kill(processes):
    for process in processes:
        process.kill()
        process.join(timeout=60)


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(0, 2)])
@pytest.mark.parametrize("when", ["before", "in a step", "while closing"])
def test_close_with_dead_async_vector_env_workers(which, when):
    world = GymWorld(2, env=AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2))
    world.reset()
    env = world._vector.env
    processes, close = list(env.processes), env.close
    if when == "while closing":
        env.close = lambda: (kill(processes[which]), close())
    else:
        kill(processes[which])
    if when == "in a step":
        with pytest.raises(ContractError):
            world.step(torch.zeros(2).long())
    world.close()
    assert not any(process.is_alive() for process in processes)
    world.close()


class Vanishes(Counting):
    """Exits its process when it is stepped."""

    def step(self, action):
        os._exit(1)


def test_close_after_a_worker_died_in_a_step():
    world = GymWorld(2, env=AsyncVectorEnv([Vanishes] * 2))
    world.reset()
    processes = list(world._vector.env.processes)
    with pytest.raises(ContractError, match=r"EOFError|Connection"):
        world.step(torch.zeros(2).long())
    kill(processes)
    world.close()
    assert not any(process.is_alive() for process in processes)


class Undecided(SyncVectorEnv):
    """A vector environment that returns None for a flag."""

    def step(self, actions):
        obs, reward, terminated, truncated, info = super().step(actions)
        return obs, reward, [*terminated[:-1], None], truncated, info


def test_a_flag_that_is_none_names_the_agent():
    world = GymWorld(3, env=Undecided([Copying] * 3))
    world.reset()
    with pytest.raises(ContractError, match=r"agent 2, step 1: terminated is .*None\]; it must be a number, True or F"):
        world.step(torch.zeros(3, dtype=torch.long))
