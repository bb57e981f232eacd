"""Gymnasium's three ways to restart tell the same; and what is told is what the environments did."""

import os
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_envs import BOTH, MODES, TERMINATED, TRUNCATED, Counting, counting, lived_alone, lived_in, seed_of
from holdfast import make_policy
from holdfast.errors import ContractError
from holdfast.experience import Collector
from holdfast.learn import replay
from holdfast.worlds import World
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.gym.vector_world import VectorWorld
from lived import ALL, live

ENDS = st.sampled_from([TERMINATED, TRUNCATED, BOTH])
SCRIPT = st.lists(st.tuples(st.integers(1, 4), ENDS), min_size=1, max_size=4)
SCRIPTS = [
    [(1, TERMINATED), (3, TRUNCATED)],
    [(2, BOTH), (1, TRUNCATED), (1, BOTH)],
    [(5, TRUNCATED), (2, TERMINATED)],
]


def some_actions(agents, steps, count=3):
    return np.random.default_rng(7).integers(0, count, (agents, steps))


def same_as_alone(world, alone, calls, seed, count=3):
    """Whether a world tells each agent what its environment does when somebody plays it by hand."""
    actions = some_actions(world.agents, calls, count)
    told = lived_in(world, calls, actions)
    return all(
        len(mine) > calls // 2 - 1
        and mine == lived_alone(alone(agent), seed_of(seed, agent), actions[agent][: len(mine)])
        for agent, mine in enumerate(told)
    )


@settings(max_examples=40)
@given(st.lists(SCRIPT, min_size=1, max_size=4), st.sampled_from(MODES), st.integers(-5, 5))
def test_every_mode_tells_what_the_environments_did(scripts, mode, seed):
    world = GymWorld(len(scripts), env=counting(*scripts), autoreset=mode, seed=seed)
    assert same_as_alone(world, lambda agent: Counting(agent, scripts[agent]), 14, seed)


@pytest.mark.parametrize("mode", MODES)
def test_cart_poles_fall_the_same_in_every_mode(mode):
    world = GymWorld(5, env="CartPole-v1", autoreset=mode, seed=-3)
    assert same_as_alone(world, lambda _: gymnasium.make("CartPole-v1"), 120, -3, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_time_limit_truncates_with_the_true_last_observation(mode):
    options = {"max_episode_steps": 7}
    world = GymWorld(3, env="CartPole-v1", autoreset=mode, options=options)
    assert same_as_alone(world, lambda _: gymnasium.make("CartPole-v1", **options), 40, 0, 2)


@pytest.mark.parametrize("mode", MODES)
def test_rows_keep_the_contract(mode):
    world = GymWorld(3, env=counting(*SCRIPTS), autoreset=mode)
    assert isinstance(world, World)
    told = live(world, 20, lambda obs, first: torch.ones(3, dtype=torch.long))
    assert world.spec.truncates == "always"
    dead = torch.zeros(3, dtype=torch.bool)
    for step in told:
        ended = step.terminated | step.truncated
        assert torch.equal(step.valid, ~ended if mode == "next_step" else torch.ones(3, dtype=torch.bool))
        if step is not told[0]:
            assert torch.equal(step.first, dead if mode == "next_step" else ended)
            assert not step.reward[step.first & step.valid & ~ended].any()
        dead = ended
        assert step.last_obs is not None
        assert (step.reward.dtype, step.obs.dtype) == (torch.float32, torch.float32)
        assert not step.trial.any()
    assert bool(told[0].first.all() & told[0].valid.all())
    assert not (told[0].terminated | told[0].truncated).any()
    assert not told[0].reward.any()


RESTARTED, BEGUN = VectorWorld._restarted, VectorWorld._begun


def last_is_next(self, *said):
    now, _ = RESTARTED(self, *said)
    return now, now


def next_is_last(self, *said):
    _, last = RESTARTED(self, *said)
    return last, last


def first_late(self, ended):
    late, self.late = vars(self).get("late", np.zeros_like(ended)), BEGUN(self, ended)
    return late


def first_early(self, ended):
    BEGUN(self, ended)
    return ended


@pytest.mark.parametrize(
    ("mode", "name", "wrong"),
    [
        ("same_step", "_restarted", last_is_next),
        ("disabled", "_restarted", last_is_next),
        ("disabled", "_restarted", next_is_last),
        ("next_step", "_begun", first_late),
        ("next_step", "_begun", first_early),
    ],
)
def test_what_is_told_wrong_is_seen(monkeypatch, mode, name, wrong):
    scripts = [[(2, TRUNCATED), (3, TERMINATED)]]
    told = []
    for _ in range(2):
        world = GymWorld(2, env=counting(*scripts), autoreset=mode)
        told.append(same_as_alone(world, lambda agent: Counting(agent, scripts[0]), 14, 0))
        monkeypatch.setattr(VectorWorld, name, wrong)
    assert told == [True, False]


@pytest.mark.parametrize("mode", MODES)
def test_episodes_have_as_many_counted_steps_as_they_are_long(mode):
    scripts = [[(1, TERMINATED), (4, TRUNCATED)], [(3, BOTH)]]
    world = GymWorld(2, env=counting(*scripts), autoreset=mode)
    policy = make_policy("auto", world, seed=0, hidden_size=8, num_layers=1)
    collector = Collector(world, policy, length=60, horizon=6, seed=0)
    segments = collector.rollout(0)
    lengths = collector.episodes.take()
    # Whole cycles: every mode fits a whole number of them into 60 calls but for the last one.
    assert 2.6 <= lengths["charts/episodic_length"] <= 3.0
    assert bool(segments.steps["valid"].all()) == (mode != "next_step")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inputs", [{}, {"previous_action": True, "previous_reward": True}])
def test_replaying_gives_what_was_thought_in_every_mode(mode, inputs):
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
            lived = segments.steps[key][valid]
            error = (again[key][valid] - lived).abs() / lived.abs().clamp(min=1)
            assert float(error.max()) <= 1e-5


def test_reset_begins_anew_wherever_the_world_was():
    for mode in MODES:
        world = GymWorld(3, env="CartPole-v1", autoreset=mode, seed=4)
        one = live(world, 33, lambda obs, first: (obs[:, 0] > 0).long())
        other = live(world, 33, lambda obs, first: (obs[:, 0] > 0).long())
        for x, y in zip(one, other, strict=True):
            assert all(torch.equal(getattr(x, key), getattr(y, key)) for key in (*ALL, "last_obs"))


def test_agents_do_not_notice_how_many_there_are_and_seeds_differ():
    def told(agents, seed):
        world = GymWorld(agents, env="CartPole-v1", seed=seed)
        return live(world, 40, lambda obs, first: (obs[:, 1] > 0).long())

    for x, y in zip(told(2, 10**30), told(5, 10**30), strict=True):
        assert all(torch.equal(getattr(x, key), getattr(y, key)[:2]) for key in ALL)
    starts = torch.cat([told(3, seed)[0].obs for seed in (0, 1, -1, 2**40)])
    assert len(starts.unique(dim=0)) == 12


def test_nothing_told_is_overwritten_later():
    for mode in MODES:
        world = GymWorld(2, env=counting(*SCRIPTS), autoreset=mode)
        told = [world.reset()]
        copies = [replace(told[0], obs=told[0].obs.clone(), last_obs=told[0].last_obs.clone())]
        for _ in range(12):
            step = world.step(torch.ones(2, dtype=torch.long))
            told.append(step)
            parts = {key: getattr(step, key).clone() for key in (*ALL, "last_obs")}
            copies.append(replace(step, **parts))
        for step, copy in zip(told, copies, strict=True):
            assert all(torch.equal(getattr(step, key), getattr(copy, key)) for key in (*ALL, "last_obs"))


class Batched(SyncVectorEnv):
    """Hands out what was last seen as a batch, as vector environments written by hand do."""

    def step(self, actions):
        *rest, info = super().step(actions)
        if "final_obs" in info:
            rows = [np.zeros(2) if obs is None else obs for obs in info["final_obs"]]
            info["final_obs"] = np.stack(rows).astype(np.float32)
        return *rest, info


class Copying(Counting):
    """As a ready vector environment takes it: nothing shown is overwritten, and there are no infos."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0], {}

    def show(self, action):
        return super().show(action).copy()


@pytest.mark.parametrize("kind", [SyncVectorEnv, Batched])
def test_a_ready_vector_environment_is_taken_as_it_is(kind):
    makes = [lambda agent=agent: Copying(agent, SCRIPTS[agent]) for agent in range(3)]
    for mode in AutoresetMode:
        world = GymWorld(3, env=kind(makes, autoreset_mode=mode), seed=3)
        assert same_as_alone(world, lambda agent: Copying(agent, SCRIPTS[agent]), 14, 3)


def test_a_native_one_restarts_in_the_next_step():
    world = GymWorld(
        7, env="CartPole-v1", vector="native", seed=1, keep=(2, 0), options={"max_episode_steps": 9}
    )
    told = live(world, 60, lambda obs, first: (obs[:, 0] > 0).long())
    again = live(world, 60, lambda obs, first: (obs[:, 0] > 0).long())
    ended = torch.stack([step.terminated | step.truncated for step in told])
    first, valid = (torch.stack([getattr(step, key) for step in told]) for key in ("first", "valid"))
    assert ended.sum() > 20
    assert torch.equal(first[1:], ended[:-1])
    assert torch.equal(valid, ~ended)
    assert all(torch.equal(x.obs, y.obs) for x, y in zip(told, again, strict=True))
    assert told[0].obs.shape == (7, 2)
    rewards = torch.stack([step.reward for step in told[1:]])
    assert torch.equal(rewards, (~first[1:]).float())


class Generous(SyncVectorEnv):
    """Pays in rows that answer no action, as vector environments written by hand may do."""

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return obs, np.where(self._begins(), 7.0, reward), *rest

    def _begins(self):
        return np.array([env.age == 0 for env in self.envs])


def test_nobody_is_paid_for_a_restart():
    makes = [lambda agent=agent: Copying(agent, SCRIPTS[agent]) for agent in range(3)]
    world = GymWorld(3, env=Generous(makes, autoreset_mode=AutoresetMode.NEXT_STEP), seed=3)
    told = live(world, 14, lambda obs, first: torch.ones(3, dtype=torch.long))
    first, reward = (torch.stack([getattr(step, key) for step in told]) for key in ("first", "reward"))
    assert first[1:].any()
    assert not reward[first].any()


def test_a_reset_right_after_an_end_forgets_that_a_restart_was_due():
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
        process.join()


@pytest.mark.parametrize("which", [slice(0, 1), slice(1, 2), slice(0, 2)])
@pytest.mark.parametrize("when", ["before", "in a step", "while closing"])
def test_processes_that_are_gone_do_not_keep_a_world_from_closing(which, when):
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
    """Ends its process when it is stepped."""

    def step(self, action):
        os._exit(1)


def test_a_process_that_ends_in_the_middle_of_a_step_does_not_keep_a_world_from_closing():
    world = GymWorld(2, env=AsyncVectorEnv([Vanishes] * 2))
    world.reset()
    processes = list(world._vector.env.processes)
    with pytest.raises(ContractError, match=r"EOFError|Connection"):
        world.step(torch.zeros(2).long())
    kill(processes)
    world.close()
    assert not any(process.is_alive() for process in processes)
