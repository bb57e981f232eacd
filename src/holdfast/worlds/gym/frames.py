"""Frames of an environment that renders them: Gymnasium's `render_mode="rgb_array"`."""

from typing import Any

import numpy as np

from holdfast.worlds.gym.episode_log import EnvError

RGB_ARRAY = "rgb_array"
"""The render mode of frames."""


def modes_of(env: Any) -> tuple[str, ...]:
    """Return the render modes that an environment declares."""
    return tuple((getattr(env, "metadata", None) or {}).get("render_modes") or ())


def frame_of(env: Any, agent: int | None = None) -> np.ndarray | None:
    """Return the current frame `[height, width, 3]`; None: the environment was not made to render any."""
    if getattr(env.unwrapped, "render_mode", None) != RGB_ARRAY:
        return None
    frame = env.render()
    pixels = np.asarray(frame)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        returned = "None" if frame is None else f"{list(pixels.shape)} of {pixels.dtype}"
        raise EnvError(f"render() returned {returned}; a frame is [height, width, 3] of uint8", agent)
    return pixels
