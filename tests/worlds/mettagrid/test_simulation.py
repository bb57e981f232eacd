"""One mettagrid simulation: maps by seed and episode, ends, and the log of its actions."""

import pytest
import torch

pytest.importorskip("mettagrid")

from helpers.mettagrid_games import meadow, nested
from helpers.play_world import ALL, anything, live, stacked
from holdfast.errors import ContractError
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.mettagrid import MettaGridWorld, simulation


def same(one, other):
    return all(torch.equal(getattr(one, key), getattr(other, key)) for key in (*ALL, "last_obs"))


def test_maps_differ_by_seed_simulation_and_episode():
    for make in (meadow, nested, lambda: meadow(seed=3)):
        worlds = [MettaGridWorld(6, env=make, seed=seed, options={}) for seed in (0, 1)]
        runs = [live(world, 14, lambda obs, first: torch.zeros(6, dtype=torch.long)) for world in worlds]
        firsts = [
            step.obs[rows].clone()
            for steps in runs
            for step in steps
            if step.first.all()
            for rows in (slice(0, 3), slice(3, 6))
        ]
        assert len(firsts) == 2 * 3 * 2
        assert len({tuple(obs.flatten().tolist()) for obs in firsts}) == len(firsts)
        again = live(MettaGridWorld(6, env=make, seed=1), 14, lambda obs, first: torch.zeros(6).long())
        assert all(same(one, other) for one, other in zip(runs[1], again, strict=True))


@pytest.mark.parametrize("truncates", [False, True])
def test_time_limit_truncates_and_game_end_terminates(truncates):
    world = CheckedWorld(MettaGridWorld(3, env=meadow, options={"truncates": truncates}))
    steps = live(world, 7, anything(world))
    assert steps[-1].truncated.all()
    assert not stacked(steps, "terminated").any()
    decided = {"truncates": truncates, "ends_at": 1.0, "limit": 40}
    world = CheckedWorld(MettaGridWorld(3, env=meadow, options=decided))
    steps = live(world, 80, anything(world))
    ended = next(step for step in steps if (step.terminated | step.truncated).any())
    assert ended.terminated.all()
    assert not ended.truncated.any()
    assert float(ended.reward.sum()) == 1.0


def test_game_end_in_the_last_step_terminates():
    options = {"limit": 40, "ends_at": 1.0}
    world = MettaGridWorld(3, env=meadow, options=options)
    steps = live(world, 40, anything(world))
    steps = next(number for number, step in enumerate(steps) if step.terminated.any())
    assert steps > 1
    world = MettaGridWorld(3, env=meadow, options={**options, "limit": steps})
    steps = live(world, steps, anything(world))
    assert steps[-1].terminated.all()
    assert not steps[-1].truncated.any()


def test_episode_longer_than_the_log_is_not_replayed(monkeypatch):
    monkeypatch.setattr(simulation, "MAX_LOGGED_STEPS", 4)
    world = MettaGridWorld(3, env=meadow)
    act = anything(world)
    live(world, 4, act)
    assert world.restore(world.state()) is None
    world.step(act(None, torch.zeros(3)))
    restarted = world.restore(world.state())
    assert restarted is not None
    assert "is not replayed" in restarted.reason
    assert [log["episode"] for log in world.state()["simulations"]] == [1]


def test_saved_actions_must_be_complete():
    world = MettaGridWorld(3, env=meadow)
    live(world, 2, anything(world))
    state = world.state()
    state["simulations"][0]["actions"] = state["simulations"][0]["actions"][:-1]
    with pytest.raises(ContractError, match="'actions' of simulation 0 must be 6 bytes"):
        world.restore(state)
