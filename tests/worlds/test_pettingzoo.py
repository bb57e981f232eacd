"""PettingZoo's environments: everybody's steps are told, whoever leaves and joins, and nobody else's."""

from dataclasses import fields

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.check import check_world
from holdfast.errors import ConfigError, CrowdError
from holdfast.worlds import Step, make_world
from holdfast.worlds.pettingzoo import PettingZooWorld
from holdfast.worlds.turns import CountsFrom
from holdfast.worlds.watched import Watched
from zoo_envs import ALL_TO_3, BOTH, NAMES, TERMINATED, TRUNCATED, Visits, lived_alone, seed_of

ENDS = st.sampled_from([TERMINATED, TRUNCATED, BOTH])
LEAVING = (
    {"ann": [(0, 2, TERMINATED)], "bob": [(0, 5, TRUNCATED)], "cy": [(1, 3, TRUNCATED), (4, 5, TERMINATED)]},
)


@st.composite
def stays(draw):
    """When one person is there in an episode: from, to and how, with a step between two stays."""
    found, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(0, 2))):
        end = at + draw(st.integers(1, 3))
        found.append((at, end, draw(ENDS)))
        at = end + draw(st.integers(1, 3))
    return found


@st.composite
def episodes(draw):
    """An episode in which there is always somebody until it is over."""
    everybody = {name: draw(stays()) for name in NAMES}
    longest = max([end for each in everybody.values() for _, end, _ in each], default=1)
    everybody[draw(st.sampled_from(NAMES))] = [(0, longest, draw(ENDS))]
    return everybody


scripts = st.lists(episodes(), min_size=1, max_size=3).map(tuple)


def one_by_row(world, steps, actions):
    """What every row of a world is told in the steps in which somebody acts."""
    step, told = world.reset(), [[] for _ in range(world.agents)]
    for taken in actions[:steps]:
        before, step = step, world.step(torch.tensor(taken))
        for row in (row for row in range(world.agents) if before.valid[row]):
            ends = bool(step.terminated[row]), bool(step.truncated[row])
            last = step.last_obs[row].tolist() if True in ends else None
            begun = before.obs[row].tolist(), bool(before.first[row]), int(taken[row])
            told[row].append((*begun, float(step.reward[row]), *ends, last))
    return told


@settings(max_examples=40, deadline=None)
@given(scripts, st.integers(0, 5), st.integers(1, 3), st.randoms(use_true_random=False))
def test_everybody_is_told_what_the_environments_told_them(script, seed, envs, dice):
    actions = [[dice.randrange(3) for _ in range(3 * envs)] for _ in range(20)]
    world = Watched(PettingZooWorld(3 * envs, env=Visits, options={"script": script}, seed=seed))
    told = one_by_row(world, 20, actions)
    for number in range(envs):
        own = [each[3 * number : 3 * number + 3] for each in actions]
        alone = lived_alone(Visits(script), number, seed, own, 20)
        assert told[3 * number : 3 * number + 3] == [alone[name] for name in NAMES]


def flags_of(steps, name):
    return [[int(flag) for flag in getattr(step, name)] for step in steps]


def test_who_leaves_waits_for_the_restart_and_who_joins_begins():
    world = PettingZooWorld(3, env=Visits, options={"script": LEAVING})
    steps = [world.reset()] + [world.step(torch.zeros(3, dtype=torch.long)) for _ in range(6)]
    # Ann, Bob, Cy; the restart is in the fifth step.
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
    # Nobody's row shows nothing; who is over sees it for the last time.
    assert steps[0].obs[2].tolist() == [0, 0, 0] == steps[3].obs[0].tolist()
    assert steps[2].obs[0, 0] == steps[2].last_obs[0, 0] == 2
    # In the row of a restart the next episode is seen, and the last of the one before told.
    assert (steps[5].obs[1, 0], steps[5].last_obs[1, 0]) == (1000, 1005)
    assert steps[5].obs[1, 2] != steps[5].last_obs[1, 2]
    assert [step.reward.tolist() for step in steps[2:4]] == [[2, 12, 22], [0, 13, 23]]


def test_every_episode_has_a_seed_of_its_own_and_a_reset_is_the_first_again():
    world = PettingZooWorld(6, env=Visits, seed=7)
    lucks = [[draws_of(7, env, episode) for env in (0, 1)] for episode in range(3)]
    for _ in range(2):
        shown = [world.reset()] + [world.step(torch.zeros(6, dtype=torch.long)) for _ in range(6)]
        assert [[int(shown[at].obs[row, 2]) // 100 for row in (0, 3)] for at in (0, 3, 6)] == lucks
    assert len({luck for each in lucks for luck in each}) == 6


def draws_of(seed, env, episode):
    return int(np.random.default_rng(seed_of(seed, env, episode)).integers(1000))


def same(one, other, rows=slice(None)):
    return all(torch.equal(getattr(one, f.name)[rows], getattr(other, f.name)) for f in fields(Step))


@settings(max_examples=10, deadline=None)
@given(scripts, st.integers(0, 3), st.integers(0, 3))
def test_a_share_lives_as_in_the_whole(script, before, after):
    options = {"env": Visits, "options": {"script": script}, "seed": 3}
    envs = before + 1 + after
    whole, share = PettingZooWorld(3 * envs, **options), PettingZooWorld(3, **options)
    assert isinstance(share, CountsFrom)
    share.count_from(3 * before)
    rows = slice(3 * before, 3 * before + 3)
    assert same(whole.reset(), share.reset(), rows)
    actions = torch.randint(3, (12, 3 * envs), generator=torch.Generator().manual_seed(0))
    for taken in actions:
        assert same(whole.step(taken), share.step(taken[rows]), rows)


def test_a_share_begins_with_a_whole_crowd():
    with pytest.raises(Exception, match="agent 4 is not the first of a crowd of 3"):
        PettingZooWorld(3, env=Visits).count_from(4)


def test_numbers_outside_of_their_box_are_clipped_and_choices_counted_as_the_environment_does():
    made = []

    def make(takes):
        made.append(Visits(takes=takes))
        return made[-1]

    world = PettingZooWorld(3, env=make, options={"takes": spaces.Box(-1, 1, (2,), np.float32)})
    world.reset()
    world.step(torch.tensor([[0.5, 3.0]] * 3))
    assert made[0].taken[0]["cy"].tolist() == [0.5, 1.0]
    world = PettingZooWorld(3, env=make, options={"takes": spaces.Discrete(3, start=5)})
    world.reset()
    world.step(torch.tensor([0, 1, 2]))
    assert made[1].taken == [{"ann": 5, "bob": 6, "cy": 7}]
    with pytest.raises(Exception, match="agent 1 took action 3"):
        world.step(torch.tensor([0, 3, 2]))


def test_what_is_shown_beside_and_kept_is_shown_of_crowds_too():
    world = PettingZooWorld(
        3, env=Visits, options={"script": LEAVING}, keep=(0, 1), previous_action=True, tell_first=True
    )
    world.reset()
    step = world.step(torch.tensor([1, 2, 0]))
    assert step.obs["obs"].tolist() == [[1, 1], [1001, 2], [2000, -1]]
    assert step.obs["previous_action"].tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert step.obs["first"][:, 0].tolist() == [0, 0, 1]


def test_agents_must_make_whole_crowds():
    told = (
        r"pettingzoo:Visits has 3 agents an environment \(ann, bob, cy\); world.agents=64 is not a multiple"
    )
    with pytest.raises(CrowdError, match=rf"{told} of 3; try 63 or 66\.") as caught:
        PettingZooWorld(64, env=Visits)
    assert caught.value.crowd == 3
    with pytest.raises(ConfigError, match=r"world.agents=2 is not a multiple of 3; try 3\."):
        PettingZooWorld(2, env=Visits)


def test_all_environments_are_closed_one_that_was_made_in_vain_too():
    made = []

    def make():
        made.append(Visits())
        return made[-1]

    PettingZooWorld(6, env=make).close()
    with pytest.raises(CrowdError):
        PettingZooWorld(5, env=make)
    assert [each.closed for each in made] == [True, True, True]


class Five(Visits):
    """So many that 24 agents do not make whole crowds of them."""

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

    def is_there(self, name):
        return True


@pytest.mark.parametrize("options", [{}, {"script": LEAVING}, {"script": (ALL_TO_3, *LEAVING)}])
def test_the_contract_is_kept(options):
    make = lambda agents, seed: PettingZooWorld(agents, env=Visits, options=options, seed=seed)  # noqa: E731
    laws = check_world(make, steps=40)
    assert laws.ok, laws


def test_the_contract_is_measured_in_crowds_of_any_size():
    laws = check_world(lambda agents, seed: PettingZooWorld(agents, env=Five, seed=seed), steps=20)
    assert laws.ok, laws
    assert laws.notes[0].startswith("20 agents lived")


def test_a_real_one_keeps_the_contract():
    pytest.importorskip("mpe2")
    world = make_world("pettingzoo:mpe2.simple_spread_v3", agents=6, options={"max_cycles": 7})
    assert (world.spec.crowd, world.spec.obs_shape, len(world.spec.action_names)) == (3, (18,), 5)
    laws = check_world("pettingzoo:mpe2.simple_spread_v3", options={"max_cycles": 9}, steps=40)
    assert laws.ok, laws
