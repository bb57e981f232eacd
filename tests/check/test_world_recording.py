"""Recordings of worlds under scripted actions."""

import random

import numpy as np
import pytest
import torch
from gymnasium import spaces

import holdfast
from helpers.broken_worlds import SABOTAGES, Around, changed, recall
from helpers.scripted_world import Scripted
from holdfast.check import world_recording
from holdfast.check.world_recording import WorldUnderTest, record, record_strict, same, script
from holdfast.errors import ContractError
from holdfast.worlds import WorldSpec

pytestmark = pytest.mark.usefixtures("annotations_asleep")
STAY = torch.zeros(5, 3, dtype=torch.long)


def test_actions_do_not_depend_on_the_number_of_agents_or_steps():
    spec = WorldSpec((1,), ("a", "b", "c"))
    actions = script(spec, 6, 40)
    assert script(spec, 4, 20).equal(actions[:20, :4])
    assert not script(spec, 6, 40, version=1).equal(actions)
    assert actions.unique().tolist() == [0, 1, 2]


def test_box_actions_lie_in_all_of_the_box():
    actions = script(WorldSpec((1,), (), action=spaces.Box(-1, 1, (2,))), 50, 40)
    assert actions.shape == (40, 50, 2)
    assert 0.99 < actions.abs().max() <= 1
    choices = script(WorldSpec((1,), (), action=spaces.MultiDiscrete([2, 5])), 50, 40)
    assert (choices.amax((0, 1)) + 1).tolist() == [2, 5]


def test_recording_stacks_steps_and_actions():
    world = Scripted(3, 6)
    recording = record(world, 3, STAY)
    assert recording["reward"].equal(torch.stack([world.number(t) for t in range(6)]))
    assert recording.leaves("obs")["obs"].shape == (6, 3, 1)
    assert list(recording.leaves("last_obs")) == ["last_obs"]
    assert recording.actions.equal(STAY)
    assert (recording.faults, recording.raised, recording.overwritten) == ({}, "", [])
    assert all(recording.has_last_obs)
    stopped = record(world, 3, STAY, enough=lambda recorder: len(recorder.rows) == 3)
    assert (len(stopped["reward"]), len(stopped.actions)) == (3, 2)


def test_world_that_raises_ends_the_recording():
    recording = record(Scripted(3, 4), 3, STAY)
    assert recording.raised.startswith("step 4 raised IndexError: ")
    assert len(recording["reward"]) == 4
    with pytest.raises(ContractError, match="step 4 raised IndexError"):
        record_strict(Scripted(3, 4), 3, STAY)


def test_wrong_shape_ends_the_recording():
    class Short(Around):
        def tell(self, step, actions):
            return step if self.clock < 2 else changed(step, reward=step.reward[:2])

    recording = record(Short(Scripted(3, 6)), 3, STAY)
    assert recording.unreadable.startswith("step 2: ")
    assert list(recording.faults) == [2]
    assert len(recording["reward"]) == 2


def test_writes_into_returned_steps_and_actions_are_recorded():
    class Writes(Around):
        def do(self, actions):
            if self.clock == 3:
                # Reward and observation share their memory in this world.
                self.before.obs.add_(1)
                actions.add_(1)
            return actions

    recording = record(Writes(Scripted(3, 6)), 3, STAY)
    assert recording.overwritten == ["the actions of step 3", "step 2, obs, reward"]


def test_same_is_bitwise_with_nan_equal_to_nan():
    numbers = torch.tensor([1.0, torch.nan, 2.0])
    assert same(numbers, torch.tensor([1.0, torch.nan, 2.5])).tolist() == [True, True, False]
    with pytest.raises(ContractError, match=r"shapes \(3,\) and \(2,\)"):
        same(numbers, numbers[:2])


def test_rerun_uses_a_new_world_and_after_reset_the_same_one():
    made = []

    def make(agents, seed):
        made.append(seed)
        return recall(agents, seed)

    world = WorldUnderTest(make, agents=4, steps=10, seed=7)
    assert len(world.recording["reward"]) == 11
    assert world.after_reset.actions.equal(world.recording.actions)
    assert made == [7]
    assert world.rerun(world.recording.actions)["obs"].equal(world.recording["obs"])
    assert not world.rerun(world.recording.actions, seed=8)["obs"].equal(world.recording["obs"])
    assert made == [7, 7, 8]


def test_recording_length_follows_the_episodes():
    assert holdfast.check_world("constant", length=90).notes[0].startswith("24 agents, 191 steps")
    assert holdfast.check_world("recall", delay=2000).notes[0].startswith("24 agents, 1024 steps")


@pytest.mark.parametrize(("name", "limit"), [("SECONDS", -1.0), ("BYTES", 1)])
def test_recording_ends_at_the_limits_of_time_and_memory(monkeypatch, name, limit):
    monkeypatch.setattr(world_recording, name, limit)
    assert holdfast.check_world("recall", delay=2000).notes[0].startswith("24 agents, 15 steps")


def test_check_world_restores_the_global_generators():
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = float(torch.rand(())), np.random.rand(), random.random()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    make, _, _ = SABOTAGES["torch's own generator"]
    holdfast.check_world(make, steps=20)
    assert (float(torch.rand(())), np.random.rand(), random.random()) == expected
