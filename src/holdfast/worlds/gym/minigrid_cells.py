"""MiniGridCells: the view of MiniGrid and BabyAI as choices."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

COUNTS = [11, 6, 4]
"""Objects, colors and states of a cell: a door's state, or the agent's direction."""


class MiniGridCells(gymnasium.ObservationWrapper[Any, Any, Any]):
    """The object, color and state of each cell in view as a MultiDiscrete, without direction and mission.

    The image of MiniGrid holds these numbers as if they were brightness: an encoder of images sees next to nothing.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        if not isinstance(env.observation_space, spaces.Dict):
            raise ValueError(f"MiniGridCells reads observations of MiniGrid, not {env.observation_space}")
        cells = spaces.flatdim(env.observation_space["image"]) // len(COUNTS)
        self.observation_space = spaces.MultiDiscrete(COUNTS * cells)

    def observation(self, observation: dict[str, Any]) -> np.ndarray:
        """Return the cells row by row."""
        return observation["image"].astype(np.int64).ravel()
