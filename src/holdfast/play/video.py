"""A video of a run's policy, and a strip of its frames, for environments that render them."""

import subprocess
from pathlib import Path

import numpy as np
from PIL import Image

from holdfast.errors import ConfigError, one_line, writing
from holdfast.install import install_command
from holdfast.play import Player
from holdfast.play.play_loop import PlayLoop

STEPS, FPS = 300, 30
"""Frames of a video, and frames a second."""
STRIP, STRIP_HEIGHT = 8, 160
"""Frames of a strip, and their height in pixels."""


def require_video(file: str | Path) -> Path:
    """Return the file of a video; raise if its name or folder is wrong, or the encoder is missing."""
    path = Path(file)
    if path.suffix != ".mp4":
        raise ConfigError(f"{path}: a video ends in .mp4; try {path.with_suffix('.mp4').name}.")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}.")
    _ffmpeg()
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
            _encode([_even(frame) for frame in frames], part)
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return strip


def frame_strip(frames: list[np.ndarray]) -> np.ndarray:
    """Return evenly spaced frames side by side, with a gap between them."""
    chosen = [frames[index] for index in np.linspace(0, len(frames) - 1, min(STRIP, len(frames))).round().astype(int)]
    images = [Image.fromarray(frame) for frame in chosen]
    small = [image.resize((max(1, image.width * STRIP_HEIGHT // image.height), STRIP_HEIGHT)) for image in images]
    gap = np.full((STRIP_HEIGHT, 4, 3), 255, np.uint8)
    return np.concatenate([part for image in small for part in (np.asarray(image), gap)][:-1], axis=1)


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
    # A window that was resized would break the video.
    return [frame for frame in frames if frame.shape == frames[0].shape]


def _encode(frames: list[np.ndarray], file: Path) -> None:
    """Write frames of one size as H.264."""
    rows, columns, _ = frames[0].shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{columns}x{rows}", "-r", str(FPS), "-i", "-"]
    target = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart", str(file)]
    command = [_ffmpeg(), "-loglevel", "error", "-y", *source, *target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        for frame in frames:
            process.stdin.write(frame.tobytes())
    if process.returncode:
        raise OSError(f"ffmpeg ended with exit code {process.returncode}")


def _even(frame: np.ndarray) -> np.ndarray:
    """Return a frame with an even number of rows and columns, as H.264 needs."""
    return np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")


def _ffmpeg() -> str:
    """Return the path of an ffmpeg, which an optional package brings."""
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"A video needs a package ({one_line(error)}): {install_command('video')}.") from None
