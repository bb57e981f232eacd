"""Child processes that train: how they ended, and stopping them so that their runs are saved."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.1
TAIL_BYTES = 4096


def exit_reason(code: int) -> str:
    """Describe the exit code of a process that failed."""
    if code >= 0:
        return f"exited with {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    return f"was killed by {name}"


def last_line(log: Path) -> str:
    """Return the last line of a log file."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "it printed nothing"


@contextmanager
def terminating_cleanly() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM and SIGHUP too; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    handled = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def stop_all(processes: Sequence[subprocess.Popen[bytes]], log: Callable[[str], object]) -> None:
    """Let processes end after their iteration, saved; Ctrl-C ends them at once, and once more kills them."""
    running = [process for process in processes if process.poll() is None]
    if not running:
        return
    messages = ["stopping after this iteration; press Ctrl-C again to stop now", "stopping now", "killed"]
    for number, message in zip((signal.SIGINT, signal.SIGINT, signal.SIGKILL), messages, strict=True):
        log(message)
        for process in running:
            # Popen does not signal a process that has ended.
            process.send_signal(number)
        try:
            while any(process.poll() is None for process in running):
                time.sleep(POLL_S)
            return
        except KeyboardInterrupt:
            # The next signal.
            log("")
