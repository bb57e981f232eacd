import io

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.gym_envs import Counting
from helpers.small_replays import player_of, small_replay
from holdfast.config.run import Config
from holdfast.config.worlds import PythonConfig
from holdfast.errors import ConfigError
from holdfast.play.play_loop import PlayLoop, trim_tokens
from holdfast.play.record import changes_of, leave_replay, record_replay
from holdfast.report.frames import FRAME_WIDTH, as_webp
from holdfast.report.replay import Replay
from holdfast.worlds.env_source import EnvSource


def grids_of(replay):
    """The grid of every step, from the first one and the changes."""
    grid, changes = replay.arrays["grid"].copy(), replay.arrays["changes"]
    for step in range(replay.steps):
        for _, cell, kind in changes[changes[:, 0] == step]:
            grid.flat[cell] = kind
        yield grid.copy()


def test_a_replay_is_what_a_session_did():
    player = player_of()
    replay = record_replay(player, 30, agents=3, greedy=True)
    loop = PlayLoop(player, 3, greedy=True)
    step, session = loop.world.reset(), player.start(3)
    for t in range(30):
        result = session.step(step.obs, step.first, trial=step.trial, valid=step.valid)
        np.testing.assert_array_equal(replay.arrays["first"][t], step.first)
        np.testing.assert_array_equal(replay.arrays["action"][t, :, 0], result.actions)
        np.testing.assert_allclose(replay.arrays["value"][t], result.values, rtol=1e-6)
        norms = torch.stack([leaf.flatten(1).square().sum(1) for leaf in session.memory.values()]).sum(0).sqrt()
        np.testing.assert_allclose(replay.arrays["norm"][t], norms, rtol=1e-6)
        np.testing.assert_array_equal(replay.arrays["tokens"][t], step.obs[:, : replay.arrays["tokens"].shape[2]])
        step = loop.world.step(result.actions)
        np.testing.assert_array_equal(replay.arrays["reward"][t], step.reward)
        np.testing.assert_array_equal(replay.arrays["end"][t], step.terminated.int())
    loop.close()


def test_truncated_episodes_are_marked():
    replay = small_replay(steps=12, truncate=True)
    assert set(np.unique(replay.arrays["end"])) == {0, 2}


@pytest.mark.parametrize("world", ["tmaze", "forage", "arena"])
def test_a_grid_is_what_the_agents_see(world):
    replay = small_replay(world, steps=20)
    header, places = replay.header, replay.arrays["places"]
    names = {feature.id: feature.name for feature in header.features}
    rows, columns = header.window
    for t, grid in enumerate(grids_of(replay)):
        for agent in range(len(header.agents)):
            row, column = places[t, agent]
            cells = grid[agent // header.agents_per_env]
            assert header.kinds[cells[row, column]] != "wall"
            for place, feature, _ in replay.arrays["tokens"][t, agent]:
                if place < 0xFE and names[feature] in ("wall", "resource", "goal", "cue_north", "cue_south"):
                    at = row + (place >> 4) - rows // 2, column + (place & 15) - columns // 2
                    if all(0 <= i < size for i, size in zip(at, cells.shape, strict=True)):
                        assert header.kinds[cells[at]] == names[feature]


def test_an_agent_on_a_grid_moves_as_it_acts():
    replay = small_replay("tmaze", steps=30)
    moves = {"move_north": (-1, 0), "move_south": (1, 0), "move_west": (0, -1), "move_east": (0, 1)}
    places, grids, moved = replay.arrays["places"].astype(int), list(grids_of(replay)), 0
    for t in range(replay.steps - 1):
        for agent in range(3):
            if replay.arrays["first"][t + 1, agent]:
                continue
            target = places[t, agent] + moves[replay.header.actions[int(replay.arrays["action"][t, agent, 0])]]
            blocked = replay.header.kinds[grids[t][agent][tuple(target)]] == "wall"
            np.testing.assert_array_equal(places[t + 1, agent], places[t, agent] if blocked else target)
            moved += not blocked
    assert moved > 5


@pytest.mark.slow
def test_mettagrid_is_drawn():
    pytest.importorskip("mettagrid", reason="needs mettagrid")
    replay = small_replay("mettagrid:tmaze", steps=5, agents=8)
    assert {"floor", "wall", "cue_north"} <= set(replay.header.kinds)
    grid = replay.arrays["grid"][0]
    assert (grid == replay.header.kinds.index("wall")).mean() > 0.3
    for row, column in replay.arrays["places"][0]:
        assert replay.header.kinds[grid[row, column]] == "floor"


def test_frames_of_a_gymnasium_environment():
    replay = small_replay("gym:CartPole-v1", steps=6, agents=2)
    assert len(replay.frames) == 6
    assert replay.arrays["obs"].shape == (6, 2, 4)
    image = Image.open(io.BytesIO(replay.frames[0]))
    assert (image.format, image.width) == ("WEBP", FRAME_WIDTH)


def test_a_wide_frame_becomes_small():
    frame = np.zeros((10, 2000, 3), np.uint8)
    assert Image.open(io.BytesIO(as_webp(frame))).size == (FRAME_WIDTH, 1)


def test_changes_are_those_of_the_cells():
    grids = [
        np.zeros((1, 2, 2), np.uint8),
        np.array([[[0, 1], [0, 2]]], np.uint8),
        np.array([[[0, 0], [0, 2]]], np.uint8),
    ]
    assert changes_of(grids).tolist() == [[1, 1, 1], [1, 3, 2], [2, 1, 0]]
    assert changes_of(grids[:1]).shape == (0, 3)


def test_padding_is_removed():
    tokens = np.full((2, 3, 5, 3), 255, np.uint8)
    assert trim_tokens(tokens).shape == (2, 3, 1, 3)
    tokens[1, 2, 3] = 7
    assert trim_tokens(tokens).shape == (2, 3, 4, 3)


def test_a_run_that_ends_leaves_a_replay(tmp_path):
    player = player_of()
    file = leave_replay(tmp_path, player.policy, player.config, 1234)
    assert file == tmp_path / "replays" / "000000001234.json.gz"
    header = Replay.load(file).header
    assert (header.run, header.steps_trained, header.greedy) == (tmp_path.name, 1234, False)


def test_an_environment_that_is_an_object_is_left_alone(tmp_path):
    source = EnvSource("python:Counting", "env", Counting, 1, True)
    config = Config(world=PythonConfig(name="python:Counting", source=source))
    assert leave_replay(tmp_path, player_of().policy, config, 1) is None
    assert list(tmp_path.iterdir()) == []


def test_recording_changes_no_policy_and_ends_in_time():
    player = player_of()
    before = player.weights_hash
    assert record_replay(player, 50, agents=2, seconds=0.0).steps == 1
    assert record_replay(player, 3, agents=1).arrays["reward"].shape == (3, 1)
    assert player.weights_hash == before
    with pytest.raises(ConfigError, match=r"steps=0 agents=8; give 1 to 10,000 steps"):
        record_replay(player, 0)
