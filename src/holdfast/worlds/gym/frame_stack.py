"""Stacks of the last observations, in shapes that encoders read."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, TransformObservation

from holdfast.errors import ConfigError
from holdfast.worlds.gym.spaces import ObsConverter, require_indices

Layout = tuple[spaces.Space[Any], Callable[[Any], Any]]
"""The space of stacked observations, and the function that brings a stack `[k,...]` into it."""
SMALLEST_IMAGE = 3


def stack_frames(
    env: gymnasium.Env[Any, Any], frames: int, name: str, keep: Sequence[int] = ()
) -> gymnasium.Env[Any, Any]:
    """Stack the last `frames` observations of an environment; the first one of an episode is repeated.

    A vector `[D]` becomes `[k*D]`, the oldest first; an image `[H,W]` becomes `[k,H,W]`; the channels of `[H,W,C]` and
    `[C,H,W]` become `k*C`. Parts of a Dict or Tuple are stacked one by one. `keep` selects entries of a vector first.
    """
    space, indices = env.observation_space, require_indices(keep, env.observation_space, name)
    if indices and isinstance(space, spaces.Box):
        space = spaces.Box(space.low[indices], space.high[indices], dtype=np.dtype(space.dtype).type)
    stacked_space, reshape = _layout(space, frames, name)
    converter = ObsConverter(env.observation_space, name)

    def read(obs: Any) -> Any:
        reason = converter.mismatch(obs)
        if reason:
            raise ValueError(reason)
        # Copied: the stack keeps references, and an environment may return the same buffer again.
        return np.asarray(obs)[indices] if indices else deepcopy(obs)

    stacked = FrameStackObservation(TransformObservation(env, read, space), frames)
    return TransformObservation(stacked, reshape, stacked_space)


def _layout(space: spaces.Space[Any], frames: int, name: str) -> Layout:
    if isinstance(space, spaces.Dict):
        parts = {key: _layout(part, frames, name) for key, part in space.spaces.items()}
        stacked = spaces.Dict({key: part for key, (part, _) in parts.items()})
        return stacked, lambda obs: {key: reshape(obs[key]) for key, (_, reshape) in parts.items()}
    if isinstance(space, spaces.Tuple):
        items = [_layout(part, frames, name) for part in space.spaces]
        return spaces.Tuple([part for part, _ in items]), lambda obs: tuple(
            reshape(part) for (_, reshape), part in zip(items, obs, strict=True)
        )
    if isinstance(space, spaces.Discrete):
        return spaces.MultiDiscrete([space.n] * frames, start=[space.start] * frames), np.asarray
    if isinstance(space, spaces.MultiDiscrete):
        counts, starts = (np.tile(numbers.flatten(), frames) for numbers in (space.nvec, space.start))
        return spaces.MultiDiscrete(counts, start=starts), np.ravel
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(frames * int(np.prod(space.shape))), np.ravel
    if not isinstance(space, spaces.Box):
        raise ConfigError(
            f"{name}: world.frame_stack={frames} cannot stack {space}; supported are Box, Discrete, MultiDiscrete, "
            "MultiBinary, and Dict and Tuple of them. Wrap the environment: world.wrappers=package.module:Class."
        )
    reshape = _box_reshaper(space.shape, frames, name)
    low, high = (reshape(np.stack([bound] * frames)) for bound in (space.low, space.high))
    return spaces.Box(low, high, dtype=np.dtype(space.dtype).type), reshape


def _box_reshaper(shape: tuple[int, ...], frames: int, name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that reshapes stacked arrays `[k,*shape]`."""
    if len(shape) == 2 and max(frames, SMALLEST_IMAGE - 1) < min(shape):
        return np.asarray
    if len(shape) != 3:
        return np.ravel
    # The channels are the shorter one of the first and the last axis, as for the image encoder.
    first, _, last = shape
    channels_last = last <= first
    sides, channels = (shape[:2], frames * last) if channels_last else (shape[1:], frames * first)
    if channels > min(sides) or (not channels_last and channels == sides[-1]):
        raise ConfigError(
            f"{name}: world.frame_stack={frames} makes {channels} channels of {sides[0]}x{sides[1]} pixels; encoders "
            "take the shortest axis for the channels. Use fewer frames, leave it out (the policy has a memory), or "
            "flatten: world.wrappers=gymnasium.wrappers:FlattenObservation."
        )
    if channels_last:
        return lambda obs: np.moveaxis(obs, 0, 2).reshape(*sides, channels)
    return lambda obs: obs.reshape(channels, *sides)
