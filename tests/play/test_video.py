import subprocess
import sys

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from helpers.small_replays import player_of
from holdfast.errors import ConfigError
from holdfast.play.play_loop import PlayLoop
from holdfast.play.video import record_video
from holdfast.report.frames import STRIP, STRIP_HEIGHT, frame_strip


def test_a_video_has_a_frame_of_every_step(tmp_path):
    player = player_of("gym:CartPole-v1")
    strip = record_video(player, tmp_path / "x.mp4", steps=12)
    assert imageio_ffmpeg.count_frames_and_secs(tmp_path / "x.mp4") == (12, 0.4)
    decode = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(tmp_path / "x.mp4")]
    decode += ["-frames:v", "1", "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    pixels = subprocess.run(decode, capture_output=True, check=True, timeout=60).stdout
    first = np.frombuffer(pixels, np.uint8).reshape(400, 600, 3)
    with PlayLoop(player, 1, follow=1) as loop:
        # The encoder rounds colours.
        assert np.abs(first.astype(int) - loop.frame()).mean() < 3
    with Image.open(strip) as image:
        assert image.size == (STRIP * 600 * STRIP_HEIGHT // 400 + 4 * (STRIP - 1), STRIP_HEIGHT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.mp4", "x_strip.png"]


def test_a_strip_of_few_frames():
    assert frame_strip([np.zeros((10, 21, 3), np.uint8)]).shape == (STRIP_HEIGHT, 336, 3)


@pytest.mark.parametrize("world", ["recall", "gym:helpers.gym_envs:Counting"])
def test_a_world_without_frames_is_one_line(world, tmp_path):
    with pytest.raises(ConfigError, match=r"No video: \S+ renders no frames\. Environments of Gymnasium"):
        record_video(player_of(world), tmp_path / "x.mp4", steps=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [("x.avi", r"ends in \.mp4; try x\.mp4"), ("x", r"try x\.mp4"), ("none/x.mp4", "there is no folder")],
)
def test_names_of_videos(name, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        record_video(player_of(), tmp_path / name)


def test_a_missing_encoder_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ConfigError, match=r"A video needs a package .*\[video\]"):
        record_video(player_of(), tmp_path / "x.mp4")
