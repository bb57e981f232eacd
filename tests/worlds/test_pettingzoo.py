"""PettingZooWorld: transitions and flags of agents that join and leave."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.pettingzoo_envs import (
    ALL_TO_3,
    BOTH,
    NAMES,
    TERMINATED,
    TRUNCATED,
    Visits,
    env_transitions,
    seed_of,
)
from holdfast.check import check_world
from holdfast.errors import AgentCountError, ConfigError
from holdfast.worlds import Step, make_world
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.pettingzoo import PettingZooWorld
from holdfast.worlds.step import Shardable

ENDS = st.sampled_from([TERMINATED, TRUNCATED, BOTH])
LEAVING = ({"ann": [(0, 2, TERMINATED)], "bob": [(0, 5, TRUNCATED)], "cy": [(1, 3, TRUNCATED), (4, 5, TERMINATED)]},)


@st.composite
def stays(draw):
    """Draw the stays of one agent in an episode (start, end, end flags), with a gap between two."""
    periods, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 2))):
        end = at + draw(st.integers(1, 3))
        periods.append((at, end, draw(ENDS)))
        at = end + draw(st.integers(1, 3))
    return periods


@st.composite
def episodes(draw):
    """Draw an episode in which at least one agent is present until its end."""
    episode = {name: draw(stays()) for name in NAMES}
    longest = max([end for periods in episode.values() for _, end, _ in periods], default=1)
    episode[draw(st.sampled_from(NAMES))] = [(0, longest, draw(ENDS))]
    return episode


scripts = st.lists(episodes(), min_size=1, max_size=3).map(tuple)


def world_transitions(world, steps, actions):
    """Return the transitions of every row of a world, valid steps only."""
    step, transitions = world.reset(), [[] for _ in range(world.agents)]
    for row_actions in actions[:steps]:
        before, step = step, world.step(torch.tensor(row_actions))
        for row in (row for row in range(world.agents) if before.valid[row]):
            ends = bool(step.terminated[row]), bool(step.truncated[row])
            last = step.last_obs[row].tolist() if True in ends else None
            start = before.obs[row].tolist(), bool(before.first[row]), int(row_actions[row])
            transitions[row].append((*start, float(step.reward[row]), *ends, last))
    return transitions


@settings(max_examples=40, deadline=None)
@given(scripts, st.integers(0, 5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_world_gives_the_env_transitions_of_every_agent(script, seed, envs, dice):
    actions = [[dice.randrange(3) for _ in range(3 * envs)] for _ in range(20)]
    world = CheckedWorld(PettingZooWorld(3 * envs, env=Visits, options={"script": script}, seed=seed))
    transitions = world_transitions(world, 20, actions)
    for number in range(envs):
        env_actions = [row[3 * number : 3 * number + 3] for row in actions]
        expected = env_transitions(Visits(script), number, seed, env_actions, 20)
        assert transitions[3 * number : 3 * number + 3] == [expected[name] for name in NAMES]


def flags_of(steps, name):
    return [[int(flag) for flag in getattr(step, name)] for step in steps]


def test_flags_of_agents_that_leave_and_join():
    world = PettingZooWorld(3, env=Visits, options={"script": LEAVING})
    steps = [world.reset()] + [world.step(torch.zeros(3, dtype=torch.long)) for _ in range(6)]
    # Ann, Bob, Cy; the environment resets in the fifth step.
    assert flags_of(steps, "valid") == [
        [1, 1, 0], [1, 1, 1], [0, 1, 1], [0, 1, 0], [0, 1, 1], [1, 1, 0], [1, 1, 1],
    ]  # fmt: skip
    assert flags_of(steps, "first") == [
        [1, 1, 1], [0, 0, 1], [0, 0, 0], [0, 0, 0], [0, 0, 1], [1, 1, 0], [0, 0, 1],
    ]  # fmt: skip
    assert flags_of(steps, "terminated") == [
        [0, 0, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0],
    ]  # fmt: skip
    assert flags_of(steps, "truncated") == [
        [0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0],
    ]  # fmt: skip
    # Rows of absent agents are zero; the row of an end has the final observation.
    assert steps[0].obs[2].tolist() == [0, 0, 0] == steps[3].obs[0].tolist()
    assert steps[2].obs[0, 0] == steps[2].last_obs[0, 0] == 2
    # The row of a reset has the next episode in obs and the final observation in last_obs.
    assert (steps[5].obs[1, 0], steps[5].last_obs[1, 0]) == (1000, 1005)
    assert steps[5].obs[1, 2] != steps[5].last_obs[1, 2]
    assert [step.reward.tolist() for step in steps[2:4]] == [[2, 12, 22], [0, 13, 23]]


def test_every_episode_has_its_own_seed_and_reset_repeats_the_first():
    world = PettingZooWorld(6, env=Visits, seed=7)
    lucks = [[draws_of(7, env, episode) for env in (0, 1)] for episode in range(3)]
    for _ in range(2):
        steps = [world.reset()] + [world.step(torch.zeros(6, dtype=torch.long)) for _ in range(6)]
        assert [[int(steps[at].obs[row, 2]) // 100 for row in (0, 3)] for at in (0, 3, 6)] == lucks
    assert len({luck for row in lucks for luck in row}) == 6


def draws_of(seed, env, episode):
    return int(np.random.default_rng(seed_of(seed, env, episode)).integers(1000))


def same(one, other, rows=slice(None)):
    return all(torch.equal(getattr(one, f.name)[rows], getattr(other, f.name)) for f in fields(Step))


@settings(max_examples=10, deadline=None)
@given(scripts, st.integers(0, 3), st.integers(0, 3))
def test_shard_steps_equal_those_of_the_whole_world(script, before, after):
    options = {"env": Visits, "options": {"script": script}, "seed": 3}
    envs = before + 1 + after
    full_world, shard = PettingZooWorld(3 * envs, **options), PettingZooWorld(3, **options)
    assert isinstance(shard, Shardable)
    shard.set_agent_offset(3 * before)
    rows = slice(3 * before, 3 * before + 3)
    assert same(full_world.reset(), shard.reset(), rows)
    actions = torch.randint(3, (12, 3 * envs), generator=torch.Generator().manual_seed(0))
    for step_actions in actions:
        assert same(full_world.step(step_actions), shard.step(step_actions[rows]), rows)


def test_shard_starts_at_an_environment():
    with pytest.raises(Exception, match="a shard starts at a multiple of 3, not 4"):
        PettingZooWorld(3, env=Visits).set_agent_offset(4)


def test_box_actions_are_clipped_and_discrete_start_is_added():
    made = []

    def make(act_space):
        made.append(Visits(act_space=act_space))
        return made[-1]

    world = PettingZooWorld(3, env=make, options={"act_space": spaces.Box(-1, 1, (2,), np.float32)})
    world.reset()
    world.step(torch.tensor([[0.5, 3.0]] * 3))
    assert made[0].actions_taken[0]["cy"].tolist() == [0.5, 1.0]
    world = PettingZooWorld(3, env=make, options={"act_space": spaces.Discrete(3, start=5)})
    world.reset()
    world.step(torch.tensor([0, 1, 2]))
    assert made[1].actions_taken == [{"ann": 5, "bob": 6, "cy": 7}]
    with pytest.raises(Exception, match="agent 1 took action 3"):
        world.step(torch.tensor([0, 3, 2]))


def test_keep_and_previous_inputs():
    world = PettingZooWorld(
        3, env=Visits, options={"script": LEAVING}, keep=(0, 1), previous_action=True, tell_first=True
    )
    world.reset()
    step = world.step(torch.tensor([1, 2, 0]))
    assert step.obs["obs"].tolist() == [[1, 1], [1001, 2], [2000, -1]]
    assert step.obs["previous_action"].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert step.obs["first"][:, 0].tolist() == [0, 0, 1]


def test_agents_must_be_a_multiple_of_possible_agents():
    message = r"pettingzoo:Visits has 3 agents per environment; world.agents=64 is not a multiple"
    with pytest.raises(AgentCountError, match=rf"{message} of 3; try 63 or 66\.") as caught:
        PettingZooWorld(64, env=Visits)
    assert caught.value.agents_per_env == 3
    with pytest.raises(ConfigError, match=r"world.agents=2 is not a multiple of 3; try 3\."):
        PettingZooWorld(2, env=Visits)


def test_close_closes_every_env_also_after_a_config_error():
    made = []

    def make():
        made.append(Visits())
        return made[-1]

    PettingZooWorld(6, env=make).close()
    with pytest.raises(AgentCountError):
        PettingZooWorld(5, env=make)
    assert [env.closed for env in made] == [True, True, True]


class Five(Visits):
    """Five agents: 24 is no multiple of them."""

    possible_agents = (*NAMES, "dee", "eve")

    def show(self, name, action):
        return np.array([self.possible_agents.index(name), self.age, self.luck], np.float32)

    def step(self, actions):
        self.age += 1
        before, over = self.agents, self.age == 4
        obs = {name: self.show(name, 0) for name in before}
        self.agents = [] if over else before
        flags = dict.fromkeys(before, over)
        return obs, dict.fromkeys(before, 1.0), flags, dict.fromkeys(before, False), {}

    def is_present(self, name):
        return True


@pytest.mark.parametrize("options", [{}, {"script": LEAVING}, {"script": (ALL_TO_3, *LEAVING)}])
def test_check_world_passes(options):
    make = lambda agents, seed: PettingZooWorld(agents, env=Visits, options=options, seed=seed)  # noqa: E731
    laws = check_world(make, steps=40)
    assert laws.ok, laws


def test_check_world_with_five_agents_per_env():
    laws = check_world(lambda agents, seed: PettingZooWorld(agents, env=Five, seed=seed), steps=20)
    assert laws.ok, laws
    assert laws.notes[0].startswith("20 agents, ")


def test_mpe2_passes_check_world():
    pytest.importorskip("mpe2")
    world = make_world("pettingzoo:mpe2.simple_spread_v3", agents=6, options={"max_cycles": 7})
    assert (world.spec.agents_per_env, world.spec.obs_shape, len(world.spec.action_names)) == (3, (18,), 5)
    laws = check_world("pettingzoo:mpe2.simple_spread_v3", options={"max_cycles": 9}, steps=40)
    assert laws.ok, laws
