"""Experiment trackers: TensorBoard, W&B, Trackio and your own, each in a process of its own.

So the trainer gets no threads, prompts, output or signal handlers of a tracker's package, and an error in the
package ends that process only. Packages are imported there, and torch is not. The first input line of the
process holds the settings, each further one a step and its metrics. Its first output line is empty if the
tracker is open; every other one is an error.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.install import install_command
from holdfast.registry import Registry
from holdfast.trust import require_trust

EXTRA = {"tensorboard": "track", "trackio": "track", "wandb": "wandb"}
"""The extra that installs each tracker."""
OPENING_S = 120.0
"""Time limit for a tracker to open."""
CLOSING_S = 60.0
"""Time limit for a tracker to flush its queue."""
BACKLOG = 64 * 2**20
"""Queue size in bytes at which a slow tracker is dropped."""
EXITED = "its process exited unexpectedly"
PROGRAM = ("-c", "import sys; from holdfast.report.trackers import main; sys.exit(main())")
QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "DO_NOT_TRACK": "1",
}
REMOTE_PREFIXES = ("TRACKIO_", "HF_", "GRADIO_")
"""Environment variables that could make Trackio upload metrics."""


@dataclass(frozen=True)
class TrackerSettings:
    """Settings of one tracker."""

    tracker: str
    folder: str
    """The run's folder."""
    run: str
    config: Mapping[str, Any]
    mode: str = "on"
    """As typed: `offline` or `online` for wandb, `on` for the others."""
    resumed_step: int | None = None
    """Step of the checkpoint of a resumed run; None: a new run."""


class Tracker(ABC):
    """Base class of trackers; a subclass imports its package when it is opened."""

    @abstractmethod
    def __init__(self, settings: TrackerSettings) -> None:
        """Open the tracker."""

    @abstractmethod
    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is still queued."""


class TensorBoard(Tracker):
    """TensorBoard event files, by the writer that torch.utils.tensorboard wraps."""

    def __init__(self, settings: TrackerSettings) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # protobuf creates the classes of these modules on import.
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._writer = EventFileWriter(str(Path(settings.folder) / "tensorboard"), flush_secs=5)
        if settings.resumed_step is not None:
            # Steps after the checkpoint are logged again; this makes TensorBoard drop the earlier ones.
            start = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(settings.resumed_step + 1, session_log=start)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(step, summary=self._summary(value=values))

    def close(self) -> None:
        """Write what is still queued."""
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))


class LoggedRun(Tracker):
    """A tracker whose package has runs with `log` and `finish`."""

    _run: Any

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of a step."""
        self._run.log(metrics, step=step)

    def close(self) -> None:
        """Upload or write what is still queued."""
        self._run.finish()


class WandB(LoggedRun):
    """A W&B run with metrics and config only; offline, nothing leaves the machine."""

    def __init__(self, settings: TrackerSettings) -> None:
        import wandb

        options = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_disable_machine_info=True,
        )
        id_file = Path(settings.folder) / "wandb.id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "holdfast"),
            name=settings.run,
            dir=settings.folder,
            config=dict(settings.config),
            mode=settings.mode,  # pyright: ignore[reportArgumentType]
            settings=options,
            # A resumed run continues the same W&B run.
            id=id_file.read_text().strip(),
            resume="allow",
        )


class Trackio(LoggedRun):
    """A Trackio run in the folder that TRACKIO_DIR names."""

    def __init__(self, settings: TrackerSettings) -> None:
        import trackio

        self._run = trackio.init(
            project="holdfast",
            name=settings.run,
            config=dict(settings.config),
            resume="allow",
            auto_log_cpu=False,
            auto_log_gpu=False,
            embed=False,
        )


BUILTIN = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}
TRACKERS: Registry[Tracker] = Registry("tracker", "tracker=", "holdfast.trackers", Tracker, BUILTIN)


def main() -> int:
    """Log until the input ends: the program of a tracker's process."""
    messages = os.fdopen(os.dup(1), "w", buffering=1)
    # Discard everything that the package prints.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 1)
    os.dup2(devnull, 2)

    def send(error: object) -> None:
        messages.write(" ".join(str(error).split()) + "\n")

    def send_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        # When the disk is full, Trackio only warns.
        if "trackio" in str(message).lower():
            send(message)

    warnings.simplefilter("always")
    warnings.showwarning = send_warning
    try:
        settings = TrackerSettings(**json.loads(sys.stdin.readline()))
        tracker = TRACKERS.find(settings.tracker)(settings)
        messages.write("\n")
        for line in sys.stdin:
            tracker.write(*json.loads(line))
        tracker.close()
    except Exception as error:
        send(f"{type(error).__name__}: {error}")
        return 1
    return 0


class TrackerProcess:
    """A tracker's process. Lines it cannot take yet are queued, so training never waits for it."""

    def __init__(self, key: str, settings: TrackerSettings) -> None:
        self.key, self.name = key, settings.tracker
        child_in, self._in = os.pipe()
        self._out, child_out = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-P", *PROGRAM],
            stdin=child_in,
            stdout=child_out,
            stderr=subprocess.DEVNULL,
            env=_environment(Path(settings.folder)),
            # Ctrl-C is for the trainer; a tracker exits when its input ends.
            start_new_session=True,
        )
        os.close(child_in)
        os.close(child_out)
        os.set_blocking(self._in, False)
        self._queue = bytearray(json.dumps(vars(settings)).encode() + b"\n")

    def require_open(self) -> None:
        """Wait until the tracker is open; raise its error if it fails."""
        try:
            self._flush()
        except BrokenPipeError:
            self._queue.clear()  # the process exited early; `_read` returns its error
        message = self._read(OPENING_S)
        if message != "":
            reason = f"no answer after {OPENING_S:.0f} s" if message is None else message
            raise ConfigError(
                f"{self.name} failed to open: {reason.rstrip('.')}. Type {self.key}=off to train without it."
            )

    def write(self, step: int, metrics: Mapping[str, int | float]) -> None:
        """Send the metrics of a step."""
        message = self._read(0.0)
        if message is not None:
            raise OSError(message)
        self._queue += json.dumps([step, metrics]).encode() + b"\n"
        self._flush()
        if len(self._queue) > BACKLOG:
            raise OSError(f"it is {len(self._queue) / 2**20:.0f} MiB behind")

    def end(self, timeout: float) -> str | None:
        """Flush the queue and end the process; return the error, if any."""
        until, late = time.monotonic() + timeout, None
        try:
            while self._queue and time.monotonic() < until:
                select.select([], [self._in], [], 0.1)
                self._flush()
            os.close(self._in)
            self._process.wait(max(0.0, until - time.monotonic()))
        except BrokenPipeError:
            os.close(self._in)
            self._process.wait()
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            late = f"it had not written everything after {timeout:.0f} s"
        message = self._read(0.0)
        os.close(self._out)
        if message not in (None, EXITED):
            return message
        return late or (EXITED if self._process.returncode else None)

    def _flush(self) -> None:
        """Write as much of the queue as the pipe takes without blocking."""
        try:
            while self._queue:
                del self._queue[: os.write(self._in, self._queue[:65536])]
        except BlockingIOError:
            return

    def _read(self, timeout: float) -> str | None:
        """Return the next message of the process; None: none within the timeout."""
        if not select.select([self._out], [], [], timeout)[0]:
            return None
        text = os.read(self._out, 65536).decode(errors="replace")
        return text.strip() if text else EXITED


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of a run; one that fails is dropped, and training continues."""

    def __init__(self, processes: list[TrackerProcess], log: Callable[[str], object]) -> None:
        self._processes, self._log = processes, log

    def write(self, metrics: Mapping[str, int | float]) -> None:
        """Log one line of metrics at `global_step`; `NAME@LABEL` is logged as `NAME/LABEL`."""
        renamed = {name.replace("@", "/"): value for name, value in metrics.items()}
        for process in list(self._processes):
            try:
                process.write(int(metrics["global_step"]), renamed)
            except OSError as error:
                self._processes.remove(process)
                process.end(0.0)
                self._log_failure(process, str(error))

    def __exit__(self, *error: object) -> None:
        """Flush and end every tracker."""
        while self._processes:
            process = self._processes.pop()
            message = process.end(CLOSING_S)
            if message is not None:
                self._log_failure(process, message)

    def _log_failure(self, process: TrackerProcess, reason: str) -> None:
        self._log(f"{process.name} stopped: {reason}. Training continues; metrics.jsonl has every metric.")


def open_trackers(
    folder: Path,
    run: str,
    config_json: Mapping[str, Any],
    *,
    resumed_step: int | None = None,
    log: Callable[[str], object] = print,
    **modes: str,
) -> Trackers:
    """Open the trackers of `modes`, the values of their config keys; raise ConfigError if one fails."""
    require_trackers(**modes)
    processes = list[TrackerProcess]()
    for key, mode in modes.items():
        tracker, mode = (mode, "on") if key == "tracker" else (key, mode)
        settings = TrackerSettings(tracker, str(folder.absolute()), run, config_json, mode, resumed_step)
        processes.append(TrackerProcess(key, settings))
    try:
        for process in processes:
            process.require_open()
    except BaseException:
        for process in processes:
            process.end(0.0)
        raise
    return Trackers(processes, log)


def require_trackers(**modes: str) -> None:
    """Raise if a tracker is unknown, or the package of a built-in one is missing; nothing is imported."""
    for key, mode in modes.items():
        if key == "tracker":
            if mode in BUILTIN:
                raise ConfigError(f"tracker={mode} is built in; write {mode}={'offline' if mode == 'wandb' else 'on'}.")
            TRACKERS.require(mode)
            if ":" in mode:
                # Here, since the process that imports it does not know who named it.
                require_trust(mode, mode.partition(":")[0])
            continue
        spec = find_spec(key)
        # A plain folder of that name has no origin.
        if spec is None or spec.origin is None:
            raise ConfigError(f"{key}={mode} needs the package {key}, which is missing; {install_command(EXTRA[key])}.")


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of a tracker's process: the same modules, quiet, local files, no uploads."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(REMOTE_PREFIXES)}
    return env | QUIET | {"TRACKIO_DIR": str(folder / "trackio"), "PYTHONPATH": os.pathsep.join(sys.path)}
