"""MiniGridCells: the view of MiniGrid and BabyAI as choices."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX


class MiniGridCells(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The object, color and state of each cell in view as a MultiDiscrete, without direction and mission.

    The image of MiniGrid holds these numbers as if they were brightness: an encoder of images sees next to nothing.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        rows, columns, _ = env.observation_space["image"].shape
        # The state of a door is 0 to 2; that of the agent's own cell, its direction, 0 to 3.
        self.observation_space = spaces.MultiDiscrete([len(OBJECT_TO_IDX), len(COLOR_TO_IDX), 4] * (rows * columns))

    def observation(self, observation: dict[str, Any]) -> np.ndarray:
        """Return the cells row by row."""
        return observation["image"].astype(np.int64).ravel()
