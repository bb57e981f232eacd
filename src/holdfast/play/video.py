"""A video of a run's policy, and a strip of its frames, for environments that render them."""

from pathlib import Path

import numpy as np
from PIL import Image

from holdfast.errors import ConfigError, writing
from holdfast.play import Player
from holdfast.play.play_loop import PlayLoop
from holdfast.report.frames import ffmpeg, frame_strip, write_mp4

STEPS = 300
"""Frames of a video."""


def require_video(file: str | Path) -> Path:
    """Return the file of a video; raise if its name or folder is wrong, or the encoder is missing."""
    path = Path(file)
    if path.suffix != ".mp4":
        raise ConfigError(f"{path}: a video ends in .mp4; try {path.with_suffix('.mp4').name}.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}.")
    ffmpeg()
    return path


def record_video(player: Player, file: str | Path, steps: int = STEPS, *, seed: int = 0, greedy: bool = True) -> Path:
    """Record one agent on held-out episodes as `FILE.mp4`, and a strip of frames beside it; return the strip.

    A world that renders no frames is an error.
    """
    path = require_video(file)
    frames = _frames(player, steps, seed, greedy)
    strip = path.with_name(f"{path.stem}_strip.png")
    with writing(strip):
        Image.fromarray(frame_strip(frames)).save(strip)
    # In a file of its own until it is complete.
    part = path.with_name(f".{path.stem}.part.mp4")
    try:
        with writing(path):
            write_mp4(frames, part)
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return strip


def _frames(player: Player, steps: int, seed: int, greedy: bool) -> list[np.ndarray]:
    """Return a frame of every step."""
    frames = list[np.ndarray]()
    with PlayLoop(player, 1, follow=1, seed=seed, greedy=greedy) as loop:
        for _ in range(steps):
            frame = loop.frame()
            if frame is None:
                raise ConfigError(
                    f"No video: {loop.no_frames.rstrip('.')}. Environments of Gymnasium and PettingZoo render "
                    "frames if they declare render_mode='rgb_array'; holdfast play shows the others."
                )
            frames.append(frame)
            loop.step()
    return frames
