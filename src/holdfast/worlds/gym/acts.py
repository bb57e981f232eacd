"""What an environment takes: how its actions are told to policies, and how theirs become its own."""

import math
from typing import Any

import numpy as np
from gymnasium import spaces

from holdfast.errors import ConfigError
from holdfast.shapes import Shaped, Tensor


class Acts:
    """Turns what policies do into what a batch of environments takes.

    Choices of one go by the names `action_0`, `action_1` and so on; several choices and numbers are laid
    side by side. Choices count from 0 here, wherever the environment counts from. Numbers outside of their
    box are clipped to it.
    """

    def __init__(self, space: spaces.Space[Any], world: str) -> None:
        self.given = space
        self.names: tuple[str, ...] = ()
        self.space: spaces.MultiDiscrete | spaces.Box | None = None
        size = math.prod(space.shape or ())
        whole = isinstance(space, spaces.Box) and np.dtype(space.dtype).kind != "f"
        if isinstance(space, spaces.Discrete):
            self.names = tuple(f"action_{number}" for number in range(int(space.n)))
        elif isinstance(space, spaces.MultiDiscrete) and size:
            self.space = spaces.MultiDiscrete(space.nvec.flatten())
        elif isinstance(space, spaces.MultiBinary) and size:
            self.space = spaces.MultiDiscrete([2] * size)
        elif isinstance(space, spaces.Box) and size and not whole:
            low, high = (_narrow(wall) for wall in (space.low, space.high))
            self.space = spaces.Box(low, high, dtype=np.float32)
        else:
            raise ConfigError(
                f"{world}: its actions are {space}; what can be done is Discrete, MultiDiscrete, "
                "MultiBinary, or a Box of fractions, not empty. Wrap the environment: "
                "world.wrappers=package.module:Class."
            )
        self._dtype = np.dtype(space.dtype)
        self._start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else None

    @property
    def wanted(self) -> int | spaces.MultiDiscrete | spaces.Box:
        """What actions are checked against."""
        return len(self.names) if self.space is None else self.space

    def fit(self, actions: Shaped[Tensor, "A ..."], agents: int) -> bool:
        """Say whether actions on the CPU are well: a quick look, as it is taken at every step."""
        shape = (agents,) if self.space is None else (agents, *self.space.shape)
        if actions.shape != shape or actions.is_floating_point() != isinstance(self.space, spaces.Box):
            return False
        array = actions.numpy()
        if isinstance(self.space, spaces.Box):
            return bool(np.isfinite(array).all())
        if self.space is None:
            return bool(array.min() >= 0 and array.max() < len(self.names))
        return bool(array.min() >= 0 and (array < self.space.nvec).all())

    def write(self, actions: Shaped[Tensor, "A ..."]) -> np.ndarray:
        """Make of actions `[A]` or `[A,n]` on the CPU an array that is the environments' own."""
        array = actions.numpy().astype(self._dtype).reshape(len(actions), *(self.given.shape or ()))
        if isinstance(self.given, spaces.Box):
            return array.clip(self.given.low, self.given.high)
        return array if self._start is None else (array + self._start).astype(self._dtype)


def _narrow(wall: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return wall.flatten().astype(np.float32)
