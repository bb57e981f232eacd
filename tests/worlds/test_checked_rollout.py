"""The checks of CheckedWorld step by step, with and without their shortcut, and of a whole rollout: equal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from holdfast.errors import ContractError
from holdfast.worlds import Step, WorldSpec
from holdfast.worlds.checked_world import CheckedWorld

AGENTS, STEPS = 5, 12
SPEC = WorldSpec(obs_shape=(2,), action_names=("a", "b"), truncates="always")


class RandomSteps:
    """A world whose flags are mostly right, and sometimes not."""

    def __init__(self, seed, wrong):
        generator = torch.Generator().manual_seed(seed)

        def draw(chance):
            return torch.rand(STEPS + 1, AGENTS, generator=generator) < chance

        ends, none = draw(0.2), torch.zeros(STEPS + 1, AGENTS, dtype=torch.bool)
        cut = ends & draw(0.3)
        self.flags = {"terminated": ends & ~cut, "truncated": cut, "first": ends.clone(), "valid": ~none}
        for name in self.flags:
            self.flags[name] ^= draw(wrong)
        start = {"terminated": False, "truncated": False, "first": True, "valid": True}
        for name, value in start.items():
            self.flags[name][0] = value
        self.rewards = torch.where(draw(wrong), torch.nan, 1.0)
        self.obs = torch.where(draw(wrong)[..., None], torch.inf, torch.zeros(STEPS + 1, AGENTS, 2))
        self.obs[0] = 0.0
        self.last = torch.where(draw(wrong)[..., None], torch.nan, torch.zeros(STEPS + 1, AGENTS, 2))
        self.agents, self.spec = AGENTS, SPEC

    def at(self, t):
        flags = {name: flag[t].clone() for name, flag in self.flags.items()}
        trial = torch.zeros(AGENTS, dtype=torch.bool)
        return Step(obs=self.obs[t], reward=self.rewards[t], trial=trial, last_obs=self.last[t], **flags)

    def reset(self):
        self.t = 0
        return self.at(0)

    def step(self, actions):
        self.t += 1
        return self.at(self.t)


def error_of(run):
    try:
        run()
    except ContractError as error:
        return str(error)
    return ""


def step_by_step(world, *, has_shortcut):
    checked = CheckedWorld(world)
    checked.reset()
    for _ in range(STEPS):
        if not has_shortcut:
            checked._all_act = False
        checked.step(torch.zeros(AGENTS, dtype=torch.long))


def whole_rollout(world):
    checked = CheckedWorld(world)
    checked.reset()
    keys = {"rewards": "reward", "dones": "terminated", "truncateds": "truncated", "first": "first", "valid": "valid"}
    steps = [world.at(t) for t in range(STEPS + 1)]
    leaves = {key: torch.stack([getattr(step, name) for step in steps[:-1]], dim=1) for key, name in keys.items()}
    leaves["env_obs"] = torch.stack([step.obs for step in steps[:-1]], dim=1)
    ok = torch.stack([~(step.truncated & ~step.last_obs.isfinite().all(1)) for step in steps[1:]], dim=1)
    checked.begin_rollout(STEPS)
    checked.check_rollout(TensorDict(leaves, batch_size=[AGENTS, STEPS]), steps[-1], ok)
    checked.raise_violations()


@settings(max_examples=150)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.003, 0.03]))
def test_all_ways_to_check_find_the_same(seed, wrong):
    world = RandomSteps(seed, wrong)
    expected = error_of(lambda: step_by_step(world, has_shortcut=False))
    assert error_of(lambda: step_by_step(world, has_shortcut=True)) == expected
    assert error_of(lambda: whole_rollout(world)) == expected
    assert wrong or not expected


@pytest.mark.parametrize("flag", ["first", "terminated"])
def test_checks_of_the_test_can_fail(flag, monkeypatch):
    """A step whose flags are ignored is noticed by the comparison above."""
    worlds = [RandomSteps(seed, 0.03) for seed in range(20)]
    before = [error_of(lambda world=world: whole_rollout(world)) for world in worlds]
    for world in worlds:
        world.flags[flag][1:] = False
    assert before != [error_of(lambda world=world: whole_rollout(world)) for world in worlds]
