"""TMaze and Forage: their views, rewards and trials, and the tables they are made of."""

import pytest
import torch

from helpers.play_world import live, stacked
from holdfast.errors import ConfigError
from holdfast.worlds import make_world
from holdfast.worlds.builtin.mazes import best_with_memory, next_cells, walls_around
from holdfast.worlds.tensor_world import MOVES
from holdfast.worlds.tokens import pack_location


def test_tmaze_cue_is_visible_at_the_start_only():
    world = make_world("tmaze", agents=64, corridor=3)
    step = world.reset()
    cue = (step.obs[..., 1] == 2).any(1)
    assert cue.unique().tolist() == [False, True]
    west = torch.full((64,), 2)
    assert torch.equal(world.step(west).obs, step.obs)
    for _ in range(3):
        obs = world.step(torch.full((64,), 3)).obs
        assert bool((obs == obs[0]).all())
    # At the junction the walls are the same to both sides.
    places = set(obs[0, :, 0].tolist()) - {0xFF}
    assert places == {0x44, 0x64, 0x46, 0x56, 0x66}
    assert world.step(torch.full((64,), 0)).reward.tolist() == [-1.0 if south else 1.0 for south in cue]


def test_tmaze_limit_costs_one():
    world = make_world("tmaze", agents=3, corridor=2, limit=5)
    steps = live(world, 10, lambda obs, first: torch.tensor([0, 2, 3]))
    assert stacked(steps, "reward")[:, 0].tolist() == [0, *[0, 0, 0, 0, -1] * 2]
    assert bool(steps[5].terminated.all() & steps[10].terminated.all())


def test_forage_trials_return_to_the_hub():
    world = make_world("forage", agents=200, reach=2, trials=3)
    steps = live(world, 9, lambda obs, first: torch.zeros(200, dtype=torch.long))
    hub = steps[0].obs[0]
    assert [bool((step.obs == hub).all()) for step in steps] == [True, False, False] * 3 + [True]
    assert [step.trial.unique().tolist() for step in steps] == [[t in (3, 6)] for t in range(10)]
    paid = stacked(steps, "reward") > 0
    assert torch.equal(paid[2], paid[5])
    assert torch.equal(paid[2], paid[8])
    assert torch.equal(paid[2], (steps[2].obs[..., 1] == 1).any(1))
    assert torch.equal(steps[1].obs[0], steps[1].obs[1])
    assert 20 < int(paid[2].sum()) < 80
    assert bool(steps[9].first.all() & steps[9].terminated.all())


def test_next_cells_stay_at_walls():
    assert list(MOVES) == ["move_north", "move_south", "move_west", "move_east"]
    # Two cells side by side.
    assert next_cells([(0, 0), (0, 1)]) == [[0, 0, 0, 1], [1, 1, 0, 1]]


def test_walls_around_lists_the_closed_neighbours():
    left, right = walls_around([(0, 0), (0, 1)], feature=3)
    assert len(left) == len(right) == 7
    assert [pack_location(5, 6), 3, 1] not in left
    assert [pack_location(5, 4), 3, 1] in left
    assert [pack_location(5, 4), 3, 1] not in right


def test_tmaze_limit_must_reach_the_arms():
    with pytest.raises(ConfigError, match=r"world.limit=4: the arms are 5 steps away"):
        make_world("tmaze", agents=1, corridor=4, limit=4)
    make_world("tmaze", agents=1, corridor=4, limit=5)


def test_best_with_memory_by_hand():
    assert best_with_memory(arms=4, trials=1) == 0.25
    # The goal is in the first arm tried (pays 2 of 2), or in the second (pays 1 of 2).
    assert best_with_memory(arms=2, trials=2) == 0.75
    assert best_with_memory(arms=4, trials=8) == 0.8125
