"""The view of MiniGrid as choices."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from holdfast.worlds.gym.minigrid_cells import MiniGridCells

IMAGE = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) % np.array([11, 6, 4], np.uint8)


class View(gymnasium.Env):
    """Observations as MiniGrid has them, with a view of 2x3 cells."""

    observation_space = spaces.Dict(
        {"image": spaces.Box(0, 255, (2, 3, 3), np.uint8), "direction": spaces.Discrete(4), "mission": spaces.Text(9)}
    )
    action_space = spaces.Discrete(7)

    def reset(self, *, seed=None, options=None):
        return {"image": IMAGE, "direction": 1, "mission": "go"}, {}


def test_cells_are_choices_of_objects_colors_and_states():
    env = MiniGridCells(View())
    obs, _ = env.reset()
    assert obs in env.observation_space
    assert env.observation_space.nvec.tolist() == [11, 6, 4] * 6
    assert obs.tolist() == IMAGE.ravel().tolist()


def test_other_observations_are_refused():
    with pytest.raises(ValueError, match="reads observations of MiniGrid, not Box"):
        MiniGridCells(gymnasium.make("CartPole-v1"))
