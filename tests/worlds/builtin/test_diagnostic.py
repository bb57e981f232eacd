"""Constant and Ragged: exact values, truncation, absent agents."""

from itertools import pairwise

import pytest
import torch

from helpers.oracles import ORACLES
from helpers.play_world import anything, live, stacked
from holdfast.worlds import make_world

NOTHING = [0xFF, 0xFF, 0xFF]


def episodes_of(steps, agent):
    """Split an agent's steps into complete episodes, by `first`."""
    starts = [t for t, step in enumerate(steps) if step.first[agent]]
    return [steps[a:b] for a, b in pairwise(starts)]


def test_ragged_absent_agents_return():
    world = make_world("ragged", agents=50, delay=(0, 3), absent=(2, 5), seed=1)
    steps = live(world, 80, ORACLES["ragged"](world))
    away, there = set(), set()
    for agent in range(50):
        for episode in episodes_of(steps, agent):
            valid = [bool(step.valid[agent]) for step in episode]
            assert valid == sorted(valid, reverse=True)
            present, absent = valid.count(True), valid.count(False)
            assert [bool(step.terminated[agent]) for step in episode[1:]].index(True) == present - 1
            assert float(episode[present].reward[agent]) == 1.0
            for step in episode[present:]:
                assert step.obs[agent].tolist() == [NOTHING] * 4
            for step in episode[present + 1 :]:
                assert float(step.reward[agent]) == 0.0
                assert not step.terminated[agent]
            away.add(absent)
            there.add(present)
    assert (away, there) == ({2, 3, 4, 5}, {2, 3, 4, 5})


def test_ragged_ignores_actions_in_invalid_rows():
    world = make_world("ragged", agents=30, seed=2)
    chance = torch.randint(4, (60, 30))
    plain, other = live_both(world, chance)
    for a, b in zip(plain, other, strict=True):
        for name in ("obs", "reward", "terminated", "first", "valid"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def live_both(world, chance):
    """Step the world twice, with other actions at invalid steps."""
    rollouts = []
    for shift in (0, 1):
        steps = [world.reset()]
        for actions in chance:
            steps.append(world.step(torch.where(steps[-1].valid, actions, (actions + shift) % 4)))
        rollouts.append(steps)
    return rollouts


@pytest.mark.parametrize("gamma", [0.0, 0.9, 0.977])
def test_constant_value(gamma):
    world = make_world("constant", agents=2, length=6)
    steps = live(world, 6, anything(world))
    paid = sum(gamma**t * float(step.reward[0]) for t, step in enumerate(steps[1:]))
    assert paid == pytest.approx((1 - gamma**6) / (1 - gamma))


def test_constant_observations_and_last_obs():
    world = make_world("constant", agents=1, length=3, truncate=True)
    steps = live(world, 6, anything(world))
    assert stacked(steps, "obs")[:, 0, 0, 2].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert [step.last_obs[0, 0].tolist() for step in steps[1:]] == 2 * [NOTHING, NOTHING, [0xFE, 0, 3]]
