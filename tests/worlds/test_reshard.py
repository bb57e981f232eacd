"""A saved world continues bit for bit in any other number of shards."""

import numpy as np
import pytest
import torch

from holdfast import rng
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.errors import ConfigError, ContractError
from holdfast.worlds import make_world
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.reshard import reshard
from holdfast.worlds.step import select

FLAGS = ("reward", "terminated", "truncated", "first", "valid", "trial")
OTHERS = {
    "gym:CartPole-v1": (1, {"previous_action": True}),
    "gym:training.test_resume:Sums": (1, {"autoreset": "next_step"}),
    "pettingzoo:helpers.pettingzoo_envs:Guests": (3, {}),
    "mettagrid:tmaze": (16, {"mazes": 16, "limit": 6}),
}


def make_shards(name, agents, count, options):
    """Make a world in `count` shards, as its workers do."""
    worlds = [CheckedWorld(make_world(name, agents // count, seed=3, **options)) for _ in range(count)]
    for number, checked in enumerate(worlds):
        checked.world.set_agent_offset(number * (agents // count))
        checked.reset()
    return worlds


def saved_by(worlds, groups):
    """Return the state of shards as a WorkerPool saves it; one shard is a world without workers."""
    states = [world.state() for world in worlds]
    if len(states) == 1:
        return states[0]
    workers = len(states) // groups
    by_worker = [states[number::workers] for number in range(workers)]
    return {"workers": workers, "groups": groups, "restart_counts": [0] * workers, "shards": by_worker}


def acts(spec, agents, clock):
    return rng.randint(len(spec.action_names), 5, rng.STREAM_ACTION, agents, clock)


@pytest.mark.parametrize("name", [*sorted(WORLD_CONFIGS.keys() - {"mixture"}), *OTHERS])
def test_world_goes_on_in_any_number_of_shards(name):
    agents_per_env, options = OTHERS.get(name, (24, {"length": 12}) if name == "arena" else (1, {}))
    agents = 4 * agents_per_env
    full_world = CheckedWorld(make_world(name, agents, seed=3, **options))
    step, clock, state = full_world.reset(), 0, None
    # Whole, two groups of two workers, whole, two workers, four workers.
    for count, groups in ((1, 1), (4, 2), (1, 1), (2, 1), (4, 1)):
        worlds = make_shards(name, agents, count, options)
        if state is not None:
            workers = 0 if count == 1 else count // groups
            for world, shard in zip(worlds, reshard(state, workers, groups, worlds[0].state), strict=True):
                assert world.restore(shard) is None
        for _ in range(7):
            rows = torch.arange(agents).split(agents // count)
            step = full_world.step(acts(full_world.spec, torch.arange(agents), clock))
            for world, part in zip(worlds, rows, strict=True):
                shard_step, expected = world.step(acts(full_world.spec, part, clock)), select(step, part)
                assert all(getattr(shard_step, flag).equal(getattr(expected, flag)) for flag in FLAGS)
                assert bool((shard_step.obs == expected.obs).all())
            clock += 1
        state = saved_by(worlds, groups)


def test_whole_world_restores_the_state_of_workers():
    worlds = make_shards("recall", 4, 2, {})
    (world,) = make_shards("recall", 4, 1, {})
    assert world.restore(saved_by(worlds, 1)) is None
    assert world.state()["world"]["tensors"]["_agent"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("change", [{"restart_counts": [0, 1]}, {"shards": [[{"steps": 1}], [None]]}])
def test_agents_of_a_restarted_worker_stay_there(change):
    state = {**saved_by(make_shards("recall", 4, 2, {}), 1), **change}
    assert len(reshard(state, 2, 1, dict)) == 2
    for workers, groups in ((0, 1), (1, 2), (4, 1)):
        with pytest.raises(ConfigError, match=r"restarted .*; type trainer.num_workers=2 trainer.async_factor=1\.$"):
            reshard(state, workers, groups, dict)


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        ({"generator": 7}, {"generator": 3}, r"state\(\)\['generator'\] differs between shards and is not per agent"),
        ({"log": np.zeros(5)}, {"log": np.zeros(0)}, r"state\(\)\['log'\] has the shape \[5\], which is not per agent"),
        ({"a": 1}, {"b": 1}, r"state\(\) has other keys in every shard"),
    ],
)
def test_state_that_is_not_per_agent_is_refused(saved, current, message):
    state = {"workers": 2, "groups": 1, "restart_counts": [0, 0], "shards": [[saved], [{**saved, "generator": 8}]]}
    if "generator" not in saved:
        state["shards"][1] = [saved]
    with pytest.raises(ConfigError, match=f"into 4 shards: {message}; type trainer.num_workers=2 trainer.async_factor"):
        reshard(state, 4, 1, lambda: current)
    if "generator" not in saved:
        with pytest.raises(ConfigError, match=r"type trainer.num_workers=0\.$"):
            reshard(saved, 2, 1, lambda: current)


def test_incomplete_shards_are_refused():
    state = saved_by(make_shards("recall", 4, 2, {}), 1)
    for change in ({"workers": 3}, {"groups": 2}, {"restart_counts": [0]}):
        with pytest.raises(ContractError, match="must be those of every worker"):
            reshard({**state, **change}, 4, 1, dict)
