"""Frames of environments as small images, a strip side by side, and an mp4."""

import io
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from holdfast.errors import ConfigError, ContractError, one_line
from holdfast.install import install_command

FPS = 30
"""Frames a second of a video."""
STRIP, STRIP_HEIGHT = 8, 160
"""Frames of a strip, and their height in pixels."""
FRAME_WIDTH = 320
"""Pixels across of a small image."""
MAX_PIXELS = 4_000_000
"""Pixels of a frame that is read."""


def as_webp(frame: np.ndarray) -> bytes:
    """Return a frame as a small WebP image."""
    image = Image.fromarray(frame)
    if image.width > FRAME_WIDTH:
        image = image.resize((FRAME_WIDTH, max(1, image.height * FRAME_WIDTH // image.width)))
    return webp(image)


def webp(image: Image.Image) -> bytes:
    """Return an image as WebP."""
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=70)
    return buffer.getvalue()


def from_webp(image: bytes) -> np.ndarray:
    """Return a WebP image as a frame; one that is damaged or unpacks to too much is an error."""
    try:
        with Image.open(io.BytesIO(image), formats=("WEBP",)) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise ContractError(f"a frame has {opened.width} x {opened.height} pixels; at most {MAX_PIXELS:,}")
            return np.asarray(opened.convert("RGB"))
    except (OSError, ValueError) as error:
        raise ContractError(f"a frame cannot be read: {one_line(error)}") from None


def frame_strip(frames: Sequence[np.ndarray]) -> np.ndarray:
    """Return evenly spaced frames side by side, with a gap between them."""
    chosen = [frames[index] for index in np.linspace(0, len(frames) - 1, min(STRIP, len(frames))).round().astype(int)]
    images = [Image.fromarray(frame) for frame in chosen]
    small = [image.resize((max(1, image.width * STRIP_HEIGHT // image.height), STRIP_HEIGHT)) for image in images]
    gap = np.full((STRIP_HEIGHT, 4, 3), 255, np.uint8)
    return np.concatenate([part for image in small for part in (np.asarray(image), gap)][:-1], axis=1)


def write_mp4(frames: Sequence[np.ndarray], file: Path) -> None:
    """Write frames as H.264; those of another size than the first are left out."""
    # A window that was resized would break the video.
    even = [_even(frame) for frame in frames if frame.shape == frames[0].shape]
    rows, columns, _ = even[0].shape
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{columns}x{rows}", "-r", str(FPS), "-i", "-"]
    target = ["-an", "-c:v", "libx264", "-pix_fmt", "yuv420p", "-movflags", "+faststart", str(file)]
    command = [ffmpeg(), "-loglevel", "error", "-y", *source, *target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        for frame in even:
            process.stdin.write(frame.tobytes())
    if process.returncode:
        raise OSError(f"ffmpeg ended with exit code {process.returncode}")


def _even(frame: np.ndarray) -> np.ndarray:
    """Return a frame with an even number of rows and columns, as H.264 needs."""
    return np.pad(frame, ((0, frame.shape[0] % 2), (0, frame.shape[1] % 2), (0, 0)), mode="edge")


def ffmpeg() -> str:
    """Return the path of an ffmpeg, which an optional package brings."""
    try:
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise ConfigError(f"A video needs a package ({one_line(error)}): {install_command('video')}.") from None
