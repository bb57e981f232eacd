"""Where workers are born: a process that has loaded everything once, and of which each is a copy."""

import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from holdfast.worlds.pool.worker_error import WorkerError

BEGIN = "import sys; from holdfast.worlds.pool.nursery import serve; serve(int(sys.argv[1]))"
ERRORS = 2
"""Where a process tells what goes wrong."""
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that are for the trainer, which ends its processes itself."""
LOOKS_S = 0.005


class Nursery:
    """The trainer's side of it. It ends when nobody holds it any more, or when its trainer is gone."""

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # What worlds print is no answer of the trainer's.
            stdout=ERRORS,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        self._way = Connection(os.dup(self._mine.fileno()))
        # Runs may be trained in several threads.
        self._one_at_a_time = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether anybody can still be born."""
        return self._process.poll() is None

    def bear(self, files: Sequence[int]) -> int:
        """Start a worker that has these files; give its process."""
        around = {"path": sys.path, "environ": dict(os.environ), "folder": os.getcwd()}
        with self._one_at_a_time:
            try:
                self._way.send_bytes(pickle.dumps(("bear", around)))
                socket.send_fds(self._mine, [b"."], files)
                return pickle.loads(self._way.recv_bytes())
            except (EOFError, OSError) as error:
                raise WorkerError(
                    f"The process that workers are copied from has ended ({self._process.poll()}); what it "
                    "said stands above. Begin again, or train without workers: trainer.num_workers=0."
                ) from error

    def ended(self, pid: int, patience: float) -> int | None:
        """Wait until a worker has ended; give its exit code, or minus the signal. None: it has not."""
        with self._one_at_a_time:
            try:
                self._way.send_bytes(pickle.dumps(("ended", {"pid": pid, "patience": patience})))
                return pickle.loads(self._way.recv_bytes())
            except (EOFError, OSError):
                # Its workers end with it.
                return -signal.SIGKILL

    def close(self) -> None:
        """End it; nobody is born any more."""
        self._way.close()
        self._mine.close()
        self._process.wait()


_held: list[Nursery] = []
"""The nursery of this process, once for each who holds it."""
_taking = threading.Lock()


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Hold the nursery of this process: there is one as long as anybody does."""
    with _taking:
        held = next((each for each in _held if each.alive), None) or Nursery()
        _held.append(held)
    try:
        yield held
    finally:
        with _taking:
            _held.remove(held)
            if held not in _held:
                held.close()


def serve(way: int) -> NoReturn:
    """Bear workers until the trainer is gone."""
    # Here, so that who only asks need not load it.
    from holdfast.worlds.pool import worker

    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    files, words = socket.socket(fileno=way), Connection(os.dup(way))
    while True:
        try:
            what, told = pickle.loads(words.recv_bytes())
        except (EOFError, ConnectionResetError):
            # At once: there is nothing to put in order.
            os._exit(0)
        if what == "ended":
            words.send_bytes(pickle.dumps(_ended(**told)))
            continue
        _, handed, _, _ = socket.recv_fds(files, 1, worker.FILES)
        pid = os.fork()
        if pid == 0:
            files.close()
            words.close()
            _move_to(told)
            worker.main(*handed)
        for each in handed:
            os.close(each)
        words.send_bytes(pickle.dumps(pid))


def _move_to(around: dict[str, Any]) -> None:
    """Be where the trainer is now."""
    sys.path[:] = around["path"]
    os.environ.clear()
    os.environ.update(around["environ"])
    os.chdir(around["folder"])


def _ended(pid: int, patience: float) -> int | None:
    until = time.monotonic() + patience
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= until:
            return None
        time.sleep(LOOKS_S)
