"""Conversion of batched observations to tensors, and of action tensors to what environments take."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array
from tensordict import TensorDict

from holdfast.errors import ConfigError
from holdfast.types import Shaped, Tensor
from holdfast.worlds.gym.episode_log import EnvError
from holdfast.worlds.obs import PLAIN, Obs, check_actions, space_bounds, subspaces
from holdfast.worlds.step import Step, WorldSpec, to_device

WIDER = {"uint16": "int32", "uint32": "int64", "uint64": "int64"}
"""Integer dtypes that torch hardly supports, and the dtype used instead."""


class ObsConverter:
    """Copies batched observations into tensors, and checks them against their space.

    Floats become float32; integers keep their dtype. Entries of a Dict keep their names, those of a Tuple
    are named by number. `keep` lists the indices of a vector to keep (empty: all).
    """

    def __init__(self, space: spaces.Space[Any], world: str, keep: Sequence[int] = (), path: str = "") -> None:
        self.env_space, self.path = space, path or "observation"
        env_keys = list(space.spaces) if isinstance(space, spaces.Dict) else []
        key_of = {str(key): key for key in env_keys}
        # (name in the tensors, key in the env's observation, converter) of every entry.
        self.subspaces = [
            (
                name,
                key_of.get(name, int(name) if isinstance(space, spaces.Tuple) else name),
                ObsConverter(subspace, world, path=f"{self.path}[{name!r}]"),
            )
            for name, subspace in subspaces(space).items()
        ]
        if len(key_of) < len(env_keys):
            raise ConfigError(f"{world}: several entries of {self.path} have the same name: {env_keys}.")
        self.keep = require_indices(keep, space, world)
        self.space = self._tensor_space(world)

    def _tensor_space(self, world: str) -> spaces.Space[Any]:
        space = self.env_space
        if self.subspaces:
            entries = {name: converter.space for name, _, converter in self.subspaces}
            return spaces.Tuple(entries.values()) if isinstance(space, spaces.Tuple) else spaces.Dict(entries)
        if not isinstance(space, PLAIN) or np.dtype(space.dtype).kind not in "fiub":
            raise ConfigError(
                f"{world}: {self.path} is {space}; supported are Box, Discrete, MultiDiscrete, MultiBinary, "
                "and Dict and Tuple of them. Wrap the environment: world.wrappers=package.module:Class."
            )
        dtype = np.dtype(space.dtype)
        self.dtype = np.dtype(np.float32 if dtype.kind == "f" else WIDER.get(dtype.name, dtype))
        self.low, self.high = (None, None) if isinstance(space, spaces.Box) else space_bounds(space)
        return _tensor_box(space, self.keep, self.dtype) if isinstance(space, spaces.Box) else space

    def read(self, batch: Any, agents: Sequence[int]) -> Obs:
        """Copy a batch of observations, one row per agent."""
        if self.subspaces:
            entries = {name: converter.read(batch[key], agents) for name, key, converter in self.subspaces}
            return TensorDict(entries, batch_size=[len(agents)])
        return self._to_tensor(np.asarray(batch), agents, copy=True)

    def _to_tensor(self, array: np.ndarray, agents: Sequence[int], *, copy: bool) -> Tensor:
        """Check the rows of an array, and convert it to a tensor; without `copy` it may share the array's memory."""
        rows = len(agents)
        if array.shape != (rows, *(self.env_space.shape or ())) or not self._can_cast(array):
            raise EnvError(
                f"{self.path} of {rows} agents is {list(array.shape)} {array.dtype}; each has {self.env_space}"
            )
        if self.low is not None:
            outside = (array < self.low) | (array > self.high)
            if outside.any():
                row = int(outside.nonzero()[0][0])
                raise EnvError(f"{self.path} is {array[row].tolist()}; its space is {self.env_space}", agents[row])
        if self.keep:
            array, copy = array[:, self.keep], False
        if array.dtype == self.dtype:
            return torch.from_numpy(array.copy() if copy else array)
        with np.errstate(over="ignore"):
            return torch.from_numpy(array.astype(self.dtype))

    def read_rows(self, obs_of: Mapping[int, Any]) -> Obs:
        """Copy unbatched observations, given by agent."""
        agents, rows = list(obs_of), list(obs_of.values())
        try:
            if not self.subspaces:
                # Much faster than Gymnasium's `concatenate`.
                return self._to_tensor(np.array(rows), agents, copy=False)
            batch = concatenate(self.env_space, rows, create_empty_array(self.env_space, n=len(rows)))
        except Exception as error:
            if isinstance(error, EnvError) and error.agent is not None:
                raise
            for agent, obs in obs_of.items():
                reason = self.mismatch(obs)
                if reason:
                    raise EnvError(reason, agent) from error
            raise EnvError(f"the observations cannot be read: {error}") from error
        return self.read(batch, agents)

    def mismatch(self, obs: Any) -> str | None:
        """Return how one observation differs from its space in structure, shape or dtype, if it does."""
        for _, key, converter in self.subspaces:
            try:
                entry = obs[key]
            except (KeyError, IndexError, TypeError):
                return f"{self.path} is {type(obs).__name__} without {key!r}; its space is {self.env_space}"
            reason = converter.mismatch(entry)
            if reason:
                return reason
        if self.subspaces:
            return None
        try:
            array = np.asarray(obs)
        except ValueError:
            return f"{self.path} has rows of several lengths; its space is {self.env_space}"
        if array.shape == self.env_space.shape and self._can_cast(array):
            return None
        return f"{self.path} is {list(array.shape)} {array.dtype}; its space is {self.env_space}"

    def _can_cast(self, array: np.ndarray) -> bool:
        return np.can_cast(array.dtype, np.dtype(self.env_space.dtype), "same_kind")


def require_indices(keep: Sequence[int], space: spaces.Space[Any], world: str) -> list[int]:
    """Check the indices of `world.keep` against the observation space."""
    if not keep:
        return []
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"{world}: world.keep selects entries of a vector; the observation is {space}; leave it out.")
    size = space.shape[0]
    if not all(0 <= index < size for index in keep):
        indices = ",".join(map(str, keep))
        raise ConfigError(f"{world}: world.keep={indices}: the indices are 0 to {size - 1}.")
    return list(keep)


def _tensor_box(space: spaces.Box, keep: list[int], dtype: np.dtype[Any]) -> spaces.Box:
    """Return the Box of the selected entries, in the dtype of the tensors."""
    low, high = (bound[keep] if keep else bound for bound in (space.low, space.high))
    if dtype == np.int64:
        low, high = (np.minimum(bound, np.iinfo(np.int64).max) for bound in (low, high))
    with np.errstate(over="ignore"):
        low, high = low.astype(dtype), high.astype(dtype)
    return spaces.Box(low, high, dtype=dtype.type)


def _float32_inside(bound: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Round bounds to float32, inwards: 0.1 in float32 is above 0.1 in float64."""
    with np.errstate(over="ignore"):
        rounded = bound.astype(np.float32)
    inner = np.where(rounded < low, np.inf, np.where(rounded > high, -np.inf, rounded)).astype(np.float32)
    inside = np.nextafter(rounded, inner)
    # Two bounds may have no float32 between them, and those beyond float32 are none.
    return np.where(np.isfinite(rounded) & (low <= inside) & (inside <= high), inside, rounded)


class ActionConverter:
    """Converts action tensors to what a batch of environments takes.

    Discrete actions are named `action_0`, `action_1`, ... and count from 0, whatever the space's `start`.
    MultiDiscrete, MultiBinary and Box are flattened to `[A,n]`. Box actions are clipped to their bounds.
    """

    def __init__(self, space: spaces.Space[Any], world: str) -> None:
        self.env_space = space
        self.names: tuple[str, ...] = ()
        self.space: spaces.MultiDiscrete | spaces.Box | None = None
        size = math.prod(space.shape or ())
        if isinstance(space, spaces.Discrete):
            self.names = tuple(f"action_{number}" for number in range(int(space.n)))
        elif isinstance(space, spaces.MultiDiscrete) and size:
            self.space = spaces.MultiDiscrete(space.nvec.flatten())
        elif isinstance(space, spaces.MultiBinary) and size:
            self.space = spaces.MultiDiscrete([2] * size)
        elif isinstance(space, spaces.Box) and size and np.dtype(space.dtype).kind == "f":
            low, high = (bound.flatten() for bound in (space.low, space.high))
            self.space = spaces.Box(_float32_inside(low, low, high), _float32_inside(high, low, high), dtype=np.float32)
        else:
            raise ConfigError(
                f"{world}: its action space is {space}; supported are Discrete, MultiDiscrete, MultiBinary "
                "and a Box of floats, not empty. Wrap the environment: world.wrappers=package.module:Class."
            )
        self._dtype = np.dtype(space.dtype)
        start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
        self._start = start if np.any(start) else None

    def write(self, actions: Shaped[Tensor, "A ..."], agents: int) -> np.ndarray:
        """Check actions `[A]` or `[A,n]` and convert them to a new array for the environments."""
        actions = actions.cpu()
        check_actions(actions, agents, len(self.names) if self.space is None else self.space)
        array = actions.numpy().astype(self._dtype).reshape(len(actions), *(self.env_space.shape or ()))
        if isinstance(self.env_space, spaces.Box):
            return array.clip(self.env_space.low, self.env_space.high)
        return array if self._start is None else (array + self._start).astype(self._dtype)


def external_spec(
    name: str, obs_converter: ObsConverter, action_converter: ActionConverter, agents_per_env: int = 1
) -> WorldSpec:
    """Return the spec of a world of such environments; any of them may truncate."""
    return WorldSpec(
        obs_shape=() if obs_converter.subspaces else tuple(obs_converter.space.shape or ()),
        action_names=action_converter.names,
        observation=obs_converter.space,
        action=action_converter.space,
        truncates="always",
        name=name,
        agents_per_env=agents_per_env,
    )


def external_step(obs: Obs, last_obs: Obs, device: torch.device, reward: np.ndarray, *flags: np.ndarray) -> Step:
    """Build a step from arrays `[A]`; the flags are terminated, truncated, first and valid."""
    terminated, truncated, first, valid = map(torch.from_numpy, flags)
    step = Step(
        obs=obs,
        reward=torch.from_numpy(reward),
        terminated=terminated,
        truncated=truncated,
        first=first,
        valid=valid,
        trial=torch.zeros_like(first),
        last_obs=last_obs,
    )
    # Comparing devices takes as long as moving: most worlds stay where they are.
    return step if device.type == "cpu" else to_device(step, device)
