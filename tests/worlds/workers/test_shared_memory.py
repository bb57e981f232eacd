"""Shared memory: the layout of steps and actions, and copies into it."""

import os
from itertools import pairwise

import pytest
import torch
from tensordict import TensorDict

from holdfast.worlds import Step, make_world
from holdfast.worlds.workers.shared_memory import ALIGNMENT, Layout, open_memory, schema_of, write_step

FLAGS = ("reward", "terminated", "truncated", "first", "valid", "trial")


@pytest.fixture
def memory():
    file = open_memory()
    yield file
    os.close(file)


def step_of(agents, obs, last_obs=None):
    no = torch.zeros(agents, dtype=torch.bool)
    return Step(obs, torch.arange(float(agents)), no, no, ~no, ~no, no, last_obs)


def test_shared_memory_round_trip():
    step = make_world("gym:CartPole-v1", 3, seed=1, previous_action=True, previous_reward=True).reset()
    layout = Layout(schema_of(step), rows=6, groups=2, numbers=1)
    memory = open_memory()
    one, other = layout.map(memory), layout.map(memory)
    write_step(step, one.step(1, 0), slice(3, 6))
    shared = other.step(1, 0)
    assert all(getattr(shared, name)[3:6].equal(getattr(step, name)) for name in FLAGS)
    assert bool((shared.obs[3:6] == step.obs).all())
    assert not other.step(0, 0).first.any()
    assert not other.step(1, 1).first.any()
    one.actions(1, torch.float32, ()).fill_(0.5)
    assert other.actions(1, torch.float32, ()).eq(0.5).all()
    assert not other.step(1, 1).reward.any()
    os.close(memory)


def test_schema_follows_nested_observations():
    obs = TensorDict({"b": TensorDict({"x": torch.zeros(2, 3)}, [2]), "a": torch.zeros(2).byte()}, [2])
    schema = schema_of(step_of(2, obs))
    assert schema["obs", "b", "x"] == (torch.float32, (3,))
    assert schema["obs", "a"] == (torch.uint8, ())
    assert schema["reward",] == (torch.float32, ())
    assert len(schema) == 2 + len(FLAGS)


def test_tensor_sizes_are_aligned():
    assert Layout({}, rows=5, groups=1, numbers=1).tensor_size(torch.float32, (3,)) == ALIGNMENT
    one_row = Layout({}, rows=1, groups=1, numbers=1)
    assert one_row.tensor_size(torch.float32, (4, 4)) == ALIGNMENT
    assert one_row.tensor_size(torch.float32, (17,)) == 2 * ALIGNMENT


def test_steps_and_actions_of_all_groups_do_not_overlap(memory):
    layout = Layout(schema_of(step_of(3, torch.zeros(3, 5))), rows=3, groups=2, numbers=2)
    buffers = layout.map(memory)
    tensors = [
        getattr(buffers.step(group, slot), name) for group in range(2) for slot in range(2) for name in ("obs", *FLAGS)
    ]
    tensors += [buffers.actions(group, torch.int64, (2,)) for group in range(2)]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] - spans[0][0] <= os.fstat(memory).st_size


def test_write_step_skips_a_missing_last_obs(memory):
    step = step_of(2, torch.ones(2, 1), last_obs=torch.full((2, 1), 7.0))
    buffers = Layout(schema_of(step), rows=2, groups=1, numbers=1).map(memory)
    target = buffers.step(0, 0)
    write_step(step, target, slice(0, 2))
    write_step(step_of(1, torch.zeros(1, 1)), target, slice(1, 2))
    assert target.obs[:, 0].tolist() == [1, 0]
    assert target.last_obs[:, 0].tolist() == [7, 7]


def test_write_step_copies_rows_of_every_leaf():
    obs = TensorDict({"a": torch.ones(2), "b": TensorDict({"x": torch.ones(2, 3)}, [2])}, [2])
    target = TensorDict({"a": torch.zeros(4), "b": TensorDict({"x": torch.zeros(4, 3)}, [4])}, [4])
    write_step(step_of(2, obs), step_of(4, target), slice(1, 3))
    assert target["a"].tolist() == [0, 1, 1, 0]
    assert target["b", "x"].sum(1).tolist() == [0, 3, 3, 0]
