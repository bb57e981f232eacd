"""The section of a report that shows the policy act: the newest replay, its frames as a strip and an mp4."""

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image

from holdfast.errors import ConfigError, HoldfastError, one_line
from holdfast.report.frames import frame_strip, from_webp, webp, write_mp4
from holdfast.report.replay import Replay
from holdfast.report.run_data import RunData
from holdfast.report.section import Report, Section, command
from holdfast.report.theme import plain
from holdfast.report.viewer import viewer_section

MAX_VIEWER, MAX_VIDEO = 1_100_000, 300_000
"""Characters of a viewer with its replay, and of an mp4: the page stays below 2 MB."""
MAX_FRAMES = 300
"""Frames of an mp4."""


def watch_it(report: Report) -> Section:
    """Show the newest replay of the run."""
    name, title, run = "watch", "Watch it", report.run
    replays = run.folder / "replays"
    files = [file for file in replays.iterdir() if file.is_file()] if replays.is_dir() else []
    if not files:
        return Section(name, title, "No episode was recorded.", body=f"<p>{command('play', run)} plays live.</p>")
    newest = max(files, key=lambda file: file.stat().st_mtime)
    file = escape(plain(newest.name))
    try:
        replay = Replay.load(newest)
        viewer, frames = viewer_section(replay), _frames(run, replay)
    except HoldfastError as error:
        # The error of a file begins with its path.
        reason = one_line(error, 400).rpartition("cannot be shown: ")[2]
        return Section(name, title, f"The replay {file} cannot be shown: {escape(plain(reason, 320))}")
    if len(viewer) > MAX_VIEWER:
        return Section(name, title, f"The replay {file} is too large for this page.", body=frames)
    more = f"{command('play', run)} plays live, and changes memories."
    return Section(
        name,
        title,
        _lead(replay),
        of=report.name_of(0),
        body=f"{viewer}{frames}<p class='soft'>From replays/{file}; {more}</p>",
    )


def _lead(replay: Replay) -> str:
    header, count = replay.header, len(replay.header.agents)
    actions = "most likely" if header.greedy else "sampled"
    return (
        f"{count} agent{'s' * (count > 1)} on held-out episodes for {replay.steps:,} steps, with {actions} actions, "
        f"after {header.steps_trained:,} steps of training."
    )


def _frames(run: RunData, replay: Replay) -> str:
    """Return a strip of the frames and an mp4 of them, if there are frames."""
    if not replay.frames:
        return ""
    frames = [from_webp(frame) for frame in replay.frames[:MAX_FRAMES]]
    strip = b64encode(webp(Image.fromarray(frame_strip(frames)))).decode()
    last = int(replay.arrays["frame_steps"][len(frames) - 1])
    where = f"the environment of agent {replay.header.agents[0]}, from step 0 to step {last:,}"
    alt = escape(f"Frames of {where}", quote=True)
    html = (
        f'<div class="frames"><img alt="{alt}" src="data:image/webp;base64,{strip}"></div>'
        f"<p class='soft'>Frames of {escape(where)}.</p>"
    )
    try:
        video = b64encode(_mp4(frames)).decode()
    except ConfigError as error:
        return f"{html}<p class='soft'>{escape(one_line(error))}</p>"
    if len(video) > MAX_VIDEO:
        save = command("eval", run, "--video", "FILE.mp4")
        return f"{html}<p class='soft'>The video is too large for this page: {save} writes it.</p>"
    return (
        f'{html}<video controls loop muted playsinline src="data:video/mp4;base64,{video}" '
        'aria-label="The same frames as a video"></video>'
    )


def _mp4(frames: Sequence[np.ndarray]) -> bytes:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "frames.mp4"
        write_mp4(frames, file)
        return file.read_bytes()
