"""Stacked observations: which frames, in which shape, in every autoreset mode, saved and in workers."""

from functools import partial

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

import holdfast
from helpers.gym_envs import MODES, TERMINATED, TRUNCATED, Counting, Sampling, counting, world_transitions
from holdfast.errors import ConfigError, ContractError
from holdfast.policies.spaces import make_encoder
from holdfast.worlds import make_world
from holdfast.worlds.gym import GymWorld
from holdfast.worlds.save_restore import restore_world, save_world
from holdfast.worlds.workers import WorkerPool

SCRIPTS = [[(3, TRUNCATED), (1, TERMINATED)], [(2, TERMINATED)]]
FRAMES = 3


def stack_of(rows, number):
    """Return the stack that ends with a row's observation: the first one of its episode is repeated."""
    start = max(index for index in range(number + 1) if rows[index][1])
    indices = [max(start, number - back) for back in reversed(range(FRAMES))]
    return [entry for index in indices for entry in rows[index][0]]


@pytest.mark.parametrize("mode", MODES)
def test_stacks_hold_the_last_observations_of_the_episode(mode):
    actions, calls = [[step % 3 for step in range(20)]] * 2, 12
    plain = world_transitions(GymWorld(2, env=counting(*SCRIPTS), autoreset=mode), calls, actions)
    stacked = world_transitions(GymWorld(2, env=counting(*SCRIPTS), autoreset=mode, frame_stack=FRAMES), calls, actions)
    for expected, rows in zip(plain, stacked, strict=True):
        assert len(rows) == len(expected) > 5
        for number, (row, plain_row) in enumerate(zip(rows, expected, strict=True)):
            assert row[0] == stack_of(expected, number)
            assert row[1:6] == plain_row[1:6]
            if plain_row[6] is not None:
                assert row[6] == [*stack_of(expected, number)[2:], *plain_row[6]]


def image(*shape, high=255):
    return spaces.Box(0, high, shape, np.uint8)


@pytest.mark.parametrize(
    ("space", "stacked"),
    [
        (spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (12,))),
        (spaces.Box(-1, 1, ()), spaces.Box(-1, 1, (4,))),
        (spaces.Box(-1, 1, (5, 2)), spaces.Box(-1, 1, (40,))),
        (image(12, 9), image(4, 12, 9)),
        (image(12, 16, 3), image(12, 16, 12)),
        (image(2, 16, 9), image(8, 16, 9)),
        (spaces.Discrete(3, start=2), spaces.MultiDiscrete([3] * 4, start=[2] * 4)),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 3] * 4)),
        (spaces.MultiBinary(3), spaces.MultiBinary(12)),
        (
            spaces.Dict({"x": spaces.Discrete(2), "y": spaces.Tuple([image(9, 9)])}),
            spaces.Dict({"x": spaces.MultiDiscrete([2] * 4), "y": spaces.Tuple([image(4, 9, 9)])}),
        ),
    ],
    ids=str,
)
def test_stacked_spaces_are_those_that_policies_read(space, stacked):
    world = GymWorld(2, env=lambda: Sampling(space), frame_stack=4)
    assert world.spec.observation == stacked
    encoder, step = make_encoder(world.spec, 5), world.reset()
    for _ in range(4):
        assert encoder(step.obs).shape == (2, 5)
        step = world.step(torch.zeros(2, dtype=torch.long))


class Film(Sampling):
    """Every pixel is 10 times the age of the episode, plus the number of its channel on the axis `channel_axis`."""

    def __init__(self, shape, channel_axis):
        super().__init__(image(*shape))
        self.colours = np.zeros(shape, np.uint8)
        if channel_axis is not None:
            self.colours += np.indices(shape, np.uint8)[channel_axis]

    def reset(self, **how):
        super().reset(**how)
        return self.colours, {}

    def step(self, action):
        _, *rest = super().step(action)
        return self.colours + np.uint8(10 * self.age), *rest


@pytest.mark.parametrize(
    ("shape", "axis", "channels"),
    [((12, 9), None, [0, 0, 10]), ((12, 16, 2), 2, [0, 1, 0, 1, 10, 11]), ((2, 16, 9), 0, [0, 1, 0, 1, 10, 11])],
)
def test_frames_of_an_image_are_channels(shape, axis, channels):
    world = GymWorld(1, env=lambda: Film(shape, axis), frame_stack=3)
    world.reset()
    obs = world.step(torch.zeros(1, dtype=torch.long)).obs[0].numpy()
    pixels = np.moveaxis(obs, 0, 2) if axis != 2 else obs
    assert (pixels == np.array(channels)).all()


def test_keep_selects_from_each_frame():
    world = GymWorld(2, env=counting([(9, TRUNCATED)]), frame_stack=2, keep=[1])
    world.reset()
    world.step(torch.tensor([2, 0]))
    assert world.step(torch.tensor([1, 0])).obs.tolist() == [[2, 1], [0, 0]]
    assert world.spec.obs_shape == (2,)
    with pytest.raises(ConfigError, match=r"world.keep=2: the indices are 0 to 1"):
        GymWorld(2, env=Counting, frame_stack=2, keep=[2])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"env": lambda: Sampling(image(7, 7, 3))}, "world.frame_stack=4 makes 12 channels of 7x7 pixels"),
        ({"env": lambda: Sampling(image(3, 9, 12))}, "world.frame_stack=4 makes 12 channels of 9x12 pixels"),
        ({"env": lambda: Sampling(spaces.Text(3))}, "world.frame_stack=4 cannot stack Text"),
        ({"env": "CartPole-v1", "vector": "native"}, "world.frame_stack cannot be used with world.vector=native"),
        ({"env": SyncVectorEnv([Counting])}, "is an instance; apply options, wrappers and frame_stack where"),
        ({"env": Counting, "frame_stack": 0}, "world.frame_stack=0: there must be at least 1"),
    ],
)
def test_what_cannot_be_stacked_is_an_error(call, message):
    with pytest.raises(ConfigError, match=message):
        GymWorld(1, **{"frame_stack": 4, **call})


def test_observation_of_another_shape_is_an_error():
    class Lies(Counting):
        def step(self, action):
            obs, *rest = super().step(action)
            return obs[:1], *rest

    world = GymWorld(1, env=Lies, frame_stack=2)
    world.reset()
    with pytest.raises(
        ContractError, match=r"agent 0, step 1: step\(\) failed with ValueError: observation is \[1\] .*\)\.$"
    ):
        world.step(torch.zeros(1, dtype=torch.long))


def acts(world, clock):
    return (torch.arange(world.agents) + clock) % 2


CARTPOLE = {"frame_stack": 4, "keep": (0, 2), "options": {"max_episode_steps": 7}}


@pytest.mark.parametrize("mode", MODES)
def test_restored_stacks_are_bit_equal(mode):
    """In the middle of an episode: the stack holds frames from before the save."""
    make = partial(make_world, "gym:CartPole-v1", 3, seed=5, autoreset=mode, **CARTPOLE)
    world, restored = make(), make()
    world.reset()
    for clock in range(10):
        world.step(acts(world, clock))
    restored.reset()
    assert restore_world(restored, save_world(world)) is None
    for clock in range(10, 25):
        one, other = (each.step(acts(each, clock)) for each in (world, restored))
        assert one.obs.equal(other.obs)
        assert one.last_obs.equal(other.last_obs)
        assert one.first.equal(other.first)


def test_workers_return_the_same_stacks():
    world = make_world("gym:CartPole-v1", 4, seed=5, **CARTPOLE)
    pool = WorkerPool("gym:CartPole-v1", 4, options=CARTPOLE, workers=2, seed=5, timeout=60.0)
    try:
        assert world.reset().obs.equal(pool.reset().obs)
        for clock in range(9):
            assert world.step(acts(world, clock)).obs.equal(pool.step(acts(pool, clock)).obs)
    finally:
        pool.close()


@pytest.mark.parametrize("mode", MODES)
def test_world_check_passes_with_stacks(mode):
    report = holdfast.check_world("gym:CartPole-v1", agents=4, steps=60, autoreset=mode, frame_stack=3)
    assert report.ok, str(report)
