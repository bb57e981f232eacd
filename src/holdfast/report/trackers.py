"""Mirrors of `metrics.jsonl`: TensorBoard, W&B and Trackio, each in a process of its own."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from holdfast.errors import ConfigError

EXTRA = {"tensorboard": "track", "trackio": "track", "wandb": "wandb"}
"""Which extra brings a tracker's package."""
OPENING_S = 120.0
"""How long a tracker may take to open."""
CLOSING_S = 60.0
"""How long it may take to write, or send, what it still has."""
BACKLOG = 64 * 2**20
"""How many bytes wait for a tracker that is slow before it is given up."""
GONE = "its process ended too early"
SCRIPT = Path(__file__).with_name("mirror.py")
QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
ELSEWHERE = ("TRACKIO_", "HF_", "GRADIO_")
"""Variables that would send what Trackio is told to another machine."""


@dataclass(frozen=True)
class Asked:
    """What a tracker is to open."""

    tracker: str
    folder: Path
    run: str
    config: Mapping[str, Any]
    mode: str
    """As it was typed: wandb's `offline` or `online`, the others' `on`."""
    begun: int | None = None
    """The step after which a run goes on; none: it begins."""

    def line(self) -> bytes:
        """Write it as the mirror reads it."""
        told: dict[str, Any] = {"tracker": self.tracker, "folder": str(self.folder), "run": self.run}
        told |= {"config": dict(self.config), "mode": self.mode, "begun": self.begun}
        return json.dumps(told).encode() + b"\n"

    def environment(self) -> dict[str, str]:
        """Say where files go, and that nothing goes out."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(ELSEWHERE)}
        return kept | QUIET | {"TRACKIO_DIR": str(self.folder / "trackio")}


class Mirror:
    """One tracker's process; what it cannot take at once waits here, so training never waits for it."""

    def __init__(self, asked: Asked) -> None:
        self.name = asked.tracker
        theirs_in, self._in = os.pipe()
        self._out, theirs_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT)],
            stdin=theirs_in,
            stdout=theirs_out,
            stderr=subprocess.DEVNULL,
            env=asked.environment(),
            # Ctrl-C is for the trainer; a mirror ends when its input does.
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        os.set_blocking(self._in, False)
        self._waiting = bytearray(asked.line())

    def require_open(self) -> None:
        """Wait until it is open, or raise what it says."""
        try:
            self._push()
            said = self._said(OPENING_S)
        except BrokenPipeError:
            said = self._said(OPENING_S)
        if said != "":
            why = "it gives no answer" if said is None else said
            raise ConfigError(
                f"{self.name} does not open: {why.rstrip('.')}. Type {self.name}=off to go without it."
            )

    def write(self, step: int, numbers: Mapping[str, int | float]) -> None:
        """Hand over a step's numbers."""
        said = self._said(0.0)
        if said is not None:
            raise OSError(said)
        self._waiting += json.dumps([step, numbers]).encode() + b"\n"
        self._push()
        if len(self._waiting) > BACKLOG:
            raise OSError(f"it is {len(self._waiting) / 2**20:.0f} MiB behind")

    def end(self, patience: float) -> str | None:
        """Let it write what it has and end; say what went wrong, if anything did."""
        until, late = time.monotonic() + patience, None
        try:
            while self._waiting and time.monotonic() < until:
                select.select([], [self._in], [], 0.1)
                self._push()
            os.close(self._in)
            self._process.wait(max(0.0, until - time.monotonic()))
        except BrokenPipeError:
            os.close(self._in)
            self._process.wait()
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            late = f"it had not written everything after {patience:.0f} s"
        said = self._said(0.0)
        os.close(self._out)
        if said not in (None, GONE):
            return said
        return late or (GONE if self._process.returncode else None)

    def _push(self) -> None:
        """Give it as much as it takes without waiting."""
        try:
            while self._waiting:
                del self._waiting[: os.write(self._in, self._waiting[:65536])]
        except BlockingIOError:
            return

    def _said(self, patience: float) -> str | None:
        """Read what it says within some seconds; none: nothing."""
        if not select.select([self._out], [], [], patience)[0]:
            return None
        text = os.read(self._out, 65536).decode(errors="replace")
        return text.strip() if text else GONE


class Trackers:
    """All mirrors of a run; one that fails is left out from then on, and the run goes on."""

    def __init__(self, mirrors: list[Mirror], say: Callable[[str], object]) -> None:
        self._mirrors, self._say = mirrors, say

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, metrics: Mapping[str, int | float]) -> None:
        """Mirror one line; its step is `global_step`. `NAME@PART` is written `NAME/PART`."""
        numbers = {name.replace("@", "/"): number for name, number in metrics.items()}
        for mirror in list(self._mirrors):
            try:
                mirror.write(int(metrics["global_step"]), numbers)
            except OSError as error:
                self._mirrors.remove(mirror)
                mirror.end(0.0)
                self._give_up(mirror, str(error))

    def abandon(self) -> None:
        """End every mirror at once."""
        while self._mirrors:
            self._mirrors.pop().end(0.0)

    def close(self) -> None:
        """Let every mirror write what it still has."""
        while self._mirrors:
            mirror = self._mirrors.pop()
            said = mirror.end(CLOSING_S)
            if said is not None:
                self._give_up(mirror, said)

    def _give_up(self, mirror: Mirror, why: str) -> None:
        self._say(f"{mirror.name} stopped: {why}. The run goes on; metrics.jsonl has every number.")


def open_trackers(
    folder: Path,
    run: str,
    config_json: Mapping[str, Any],
    *,
    wandb: Literal["off", "offline", "online"] = "off",
    tensorboard: Literal["off", "on"] = "off",
    trackio: Literal["off", "on"] = "off",
    begun: int | None = None,
    say: Callable[[str], object] = print,
) -> Trackers:
    """Open the mirrors that are asked for, or refuse in one line before anything trains."""
    asked = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}
    require_trackers(**asked)
    mirrors = [
        Mirror(Asked(tracker, folder.absolute(), run, config_json, mode, begun))
        for tracker, mode in asked.items()
        if mode != "off"
    ]
    try:
        for mirror in mirrors:
            mirror.require_open()
    except BaseException:
        Trackers(mirrors, say).abandon()
        raise
    return Trackers(mirrors, say)


def require_trackers(**asked: str) -> None:
    """Refuse a tracker whose package is missing; a folder of its name is no package."""
    for tracker, mode in asked.items():
        found = find_spec(tracker) if mode != "off" else None
        if mode != "off" and (found is None or found.origin is None):
            raise ConfigError(
                f"{tracker}={mode} needs the package {tracker}, which is not installed; "
                f"type: pip install 'holdfast[{EXTRA[tracker]}]'."
            )
