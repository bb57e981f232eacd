"""popgym environments in GymWorld."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from helpers.gym_envs import MODES
from helpers.play_world import live, stacked
from holdfast import make_policy
from holdfast.rollout import Collector
from holdfast.worlds.gym import GymWorld

pytest.importorskip("popgym")
PAPER = tuple(f"popgym.wrappers:{name}" for name in ("PreviousAction", "Antialias", "Flatten"))


@pytest.mark.parametrize("mode", MODES)
def test_repeat_first_rewards_the_first_card_and_has_51_steps(mode):
    world = GymWorld(3, env="popgym:popgym-RepeatFirstEasy-v0", autoreset=mode, seed=5)
    assert (world.spec.observation, len(world.spec.action_names)) == (spaces.Discrete(4), 4)
    card = torch.zeros(3, dtype=torch.long)

    def first_card(obs, first):
        card[first] = obs[first]
        return card.clone()

    steps = live(world, 160, first_card)
    rewards, ended, valid = (stacked(steps, key) for key in ("reward", "terminated", "valid"))
    assert ended.sum(0).tolist() == [3] * 3
    counted = [[], [], []]
    for agent in range(3):
        since = 0
        for t in range(160):
            since += int(valid[t, agent])
            if ended[t + 1, agent]:
                counted[agent].append(since)
                since = 0
    assert counted == [[51] * 3] * 3
    paid = torch.where(valid[:-1], rewards[1:], 0.0).cumsum(0)
    ends = ended[1:, 0].nonzero()[:, 0]
    assert paid[ends, 0].tolist() == pytest.approx([1.0, 2.0, 3.0], abs=1e-4)


def test_position_only_cartpole_is_truncated_after_200_steps():
    world = GymWorld(4, env="popgym:popgym-PositionOnlyCartPoleEasy-v0", seed=1)
    assert world.spec.obs_shape == (2,)
    before = torch.zeros(4, 2)

    def hold(obs, first):
        # Velocities from two observations.
        moved = torch.where(first[:, None], 0.0, obs - before)
        before.copy_(obs)
        lean = obs[:, 1] + 12 * moved[:, 1] + 0.05 * obs[:, 0] + 3 * moved[:, 0]
        return (lean > 0).long()

    steps = live(world, 420, hold)
    truncated = stacked(steps, "truncated")
    assert truncated.any(), "it fell: hold it better"
    agent = int(truncated.any(0).nonzero()[0])
    end = int(truncated[:, agent].nonzero()[0])
    begun = int(stacked(steps, "first")[:end, agent].nonzero()[-1])
    assert end - begun == 200
    last, now = steps[end].last_obs[agent], steps[end].obs[agent]
    assert not torch.equal(last, now)
    assert now.abs().max() <= 0.05


def test_paper_wrappers_add_previous_action_and_first():
    world = GymWorld(2, env="popgym:popgym-RepeatFirstEasy-v0", wrappers=PAPER)
    assert world.spec.observation == spaces.Box(0, 1, (10,), np.int64)
    steps = live(world, 60, lambda obs, first: torch.full((2,), 2))
    for step in steps:
        assert torch.equal(step.obs[:, 9] == 1, step.first)
        acted = ~step.first
        assert step.obs[acted][:, 4:8].tolist() == [[0, 0, 1, 0]] * int(acted.sum())
    policy = make_policy("auto", world, seed=0, hidden_size=8, num_layers=1)
    Collector(world, policy, length=8, horizon=4, seed=0).rollout(0)
