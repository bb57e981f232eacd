"""What an environment shows, as tensors: the space that policies are built for, and the copying."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict

from holdfast.errors import ConfigError
from holdfast.shapes import Shaped, Tensor
from holdfast.worlds.gym.numbered import FaultError
from holdfast.worlds.seen import PLAIN, Seen, parts_of

WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""Whole numbers that torch hardly knows, and what holds them."""


class Sight:
    """Copies what a batch of environments shows into tensors, and says what does not fit its space.

    Fractions become float32; bytes and other whole numbers stay what they are. The parts of a Dict go by
    their names and those of a Tuple by their numbers. `keep` lists which numbers of a vector are shown;
    none: all.
    """

    def __init__(
        self, space: spaces.Space[Any], world: str, keep: Sequence[int] = (), path: str = ""
    ) -> None:
        self.given, self.path = space, path or "observation"
        theirs = list(space.spaces) if isinstance(space, spaces.Dict) else []
        names = {str(key): key for key in theirs}
        # What each part is called here, what the environment calls it, and how it is read.
        self.parts = [
            (name, names.get(name, int(name) if isinstance(space, spaces.Tuple) else name), part)
            for name, part in (
                (name, Sight(part, world, path=f"{self.path}[{name!r}]"))
                for name, part in parts_of(space).items()
            )
        ]
        if len(names) < len(theirs):
            raise ConfigError(f"{world}: parts of {self.path} have the same name: {theirs}.")
        self.keep = _checked(keep, space, world)
        self.space = self._own(world)

    def _own(self, world: str) -> spaces.Space[Any]:
        """Make the space of the tensors."""
        if self.parts:
            own = {name: part.space for name, _, part in self.parts}
            return spaces.Tuple(own.values()) if isinstance(self.given, spaces.Tuple) else spaces.Dict(own)
        if not isinstance(self.given, PLAIN) or _dtype_of(self.given).kind not in "fiub":
            raise ConfigError(
                f"{world}: {self.path} is {self.given}; what can be seen is Box, Discrete, MultiDiscrete, "
                "MultiBinary, and Dict and Tuple of them. Wrap the environment: "
                "world.wrappers=package.module:Class."
            )
        own = _dtype_of(self.given)
        self.dtype = np.dtype(np.float32 if own.kind == "f" else WIDER.get(own.name, own))
        self.least, self.most = _choices(self.given)
        return (
            _as_box(self.given, self.keep, self.dtype) if isinstance(self.given, spaces.Box) else self.given
        )

    def read(self, batch: Any, agents: Sequence[int]) -> Seen:
        """Copy what the environments of some agents show, a row an agent."""
        rows = len(agents)
        if self.parts:
            leaves = {name: part.read(batch[theirs], agents) for name, theirs, part in self.parts}
            return TensorDict(leaves, batch_size=[rows])
        array = np.asarray(batch)
        if array.shape != (rows, *(self.given.shape or ())) or not self._holds(array):
            raise FaultError(
                f"{self.path} of {rows} agents is {list(array.shape)} {array.dtype}; the space of one is "
                f"{self.given}"
            )
        if self.least is not None:
            self._require_choices(array, agents)
        return self._copied(array[:, self.keep] if self.keep else array)

    def read_rows(self, said: Mapping[int, Any]) -> Seen:
        """Copy what some agents' environments show, each by itself."""
        batch = create_empty_array(self.given, n=len(said))
        try:
            batch = concatenate(self.given, list(said.values()), batch)
        except Exception as error:
            self.blame(said)
            raise FaultError(f"what was last seen cannot be read: {error}") from error
        return self.read(batch, list(said))

    def blame(self, said: Mapping[int, Any]) -> None:
        """Raise a fault of the first of some agents whose observation does not fit the space, if any."""
        for agent, obs in said.items():
            wrong = self.misfit(obs)
            if wrong:
                raise FaultError(wrong, agent)

    def misfit(self, obs: Any) -> str | None:
        """Say how what one environment shows differs from its space in shape or kind of numbers; or not."""
        for _, theirs, part in self.parts:
            try:
                inside = obs[theirs]
            except (KeyError, IndexError, TypeError):
                return f"{self.path} is {type(obs).__name__} without {theirs!r}; its space is {self.given}"
            wrong = part.misfit(inside)
            if wrong:
                return wrong
        if self.parts:
            return None
        try:
            array = np.asarray(obs)
        except ValueError:
            return f"{self.path} has rows of several lengths; its space is {self.given}"
        if array.shape == self.given.shape and self._holds(array):
            return None
        return f"{self.path} is {list(array.shape)} {array.dtype}; its space is {self.given}"

    def _holds(self, array: np.ndarray) -> bool:
        return np.can_cast(array.dtype, _dtype_of(self.given), "same_kind")

    def _require_choices(self, array: np.ndarray, agents: Sequence[int]) -> None:
        bad = (array < self.least) | (array > self.most)
        if bad.any():
            row = int(bad.nonzero()[0][0])
            raise FaultError(f"{self.path} is {array[row].tolist()}; its space is {self.given}", agents[row])

    def _copied(self, array: np.ndarray) -> Shaped[Tensor, "rows ..."]:
        if array.dtype == self.dtype:
            return torch.from_numpy(array.copy())
        with np.errstate(over="ignore"):
            return torch.from_numpy(array.astype(self.dtype))


def _dtype_of(space: spaces.Space[Any]) -> np.dtype[Any]:
    return np.dtype(space.dtype)


def _checked(keep: Sequence[int], space: spaces.Space[Any], world: str) -> list[int]:
    """Refuse to keep what is not there."""
    if not keep:
        return []
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ConfigError(
            f"{world}: world.keep picks numbers of a vector, but {space} is shown; leave it out."
        )
    size = space.shape[0]
    if not all(0 <= place < size for place in keep):
        told = ",".join(map(str, keep))
        raise ConfigError(f"{world}: world.keep={told}: the numbers shown are 0 to {size - 1}.")
    return list(keep)


def _choices(space: spaces.Space[Any]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Say the least and the most that choices can be; None where numbers are no choices."""
    if isinstance(space, spaces.Discrete):
        return np.asarray(space.start), np.asarray(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8)
    return None, None


def _as_box(space: spaces.Box, keep: list[int], dtype: np.dtype[Any]) -> spaces.Box:
    """Write a Box with the numbers that are kept, in the precision that they are shown in."""
    low, high = (wall[keep] if keep else wall for wall in (space.low, space.high))
    if dtype == np.int64:
        low, high = (np.minimum(wall, np.iinfo(np.int64).max) for wall in (low, high))
    with np.errstate(over="ignore"):
        low, high = low.astype(dtype), high.astype(dtype)
    return spaces.Box(low, high, dtype=dtype.type)
