"""Where workers are born: a process that has loaded everything once, and of which each is a copy."""

import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from holdfast.worlds.pool.worker_error import WorkerError

BEGIN = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # These are for the trainer, which ends its processes itself.
    signal.signal(number, signal.SIG_IGN)
from holdfast.worlds.pool.nursery import serve
serve(int(sys.argv[1]))
"""
ERRORS = 2
"""Where a process tells what goes wrong."""
LOADING_S = 300.0
"""How long it may take to load everything."""
CLOSING_S = 2.0
NUMBER = struct.Struct("i")
GONE = 1 << 16
"""In place of the exit code of a worker whose nursery is gone: it ends with it, and nobody can tell how."""


class Birth:
    """A worker's process: its number, and how it ended."""

    def __init__(self, way: socket.socket, alive: subprocess.Popen[bytes]) -> None:
        self._way, self._nursery, self._code = way, alive, None
        self.pid = self._heard(LOADING_S)
        """Its number."""
        if self.pid in (None, GONE):
            raise WorkerError(
                "The process that workers are copied from gives none: what it said stands above. Begin "
                "again, or train without workers: trainer.num_workers=0."
            )

    def ended(self, patience: float) -> int | None:
        """Wait until it has ended; give its exit code, or minus the signal. None: it has not."""
        if self._code is None:
            self._code = self._heard(max(0.0, patience))
        if self._code is None and self._nursery.poll() is not None:
            self._code = GONE
        return self._code

    def signal(self, number: int) -> None:
        """Send it a signal, if it is there."""
        if self.ended(0.0) is None and self.pid is not None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Ask no more."""
        self._way.close()

    def _heard(self, patience: float) -> int | None:
        # Not settimeout: a patience of 0 is one, and a signal may break the waiting off.
        if not select.select([self._way], [], [], patience)[0]:
            return None
        told = self._way.recv(NUMBER.size)
        return NUMBER.unpack(told)[0] if told else GONE


class Nursery:
    """The trainer's side of it. It ends when nobody holds it any more, or when its trainer is gone.

    Every worker has a way of its own by which its number comes, and in the end its exit code: whoever is
    broken off while waiting leaves nothing behind that another could take for an answer.
    """

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # What worlds print is no answer of the trainer's.
            stdout=ERRORS,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()

    @property
    def alive(self) -> bool:
        """Whether anybody can still be born."""
        return self._process.poll() is None

    def bear(self, files: Sequence[int]) -> Birth:
        """Start a worker that has these files."""
        mine, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._mine, [b"."], [*files, theirs.fileno()])
            except OSError as error:
                mine.close()
                raise WorkerError("The process that workers are copied from has ended.") from error
        try:
            return Birth(mine, self._process)
        except BaseException:
            mine.close()
            raise

    def close(self) -> None:
        """End it; nobody is born any more."""
        self._mine.close()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
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
    """Bear workers and tell how they ended, until the trainer is gone."""
    # Here, so that who only asks need not load it.
    from holdfast.worlds.pool import worker

    orders, children, me = socket.socket(fileno=way), dict[int, socket.socket](), os.getpid()
    # A child that ends wakes up who waits for orders.
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([orders, woken], [], [])
        if woken in ready:
            woken.recv(1 << 12)
            _tell_ended(children)
        if orders not in ready:
            continue
        word, handed, _, _ = socket.recv_fds(orders, 1, worker.FILES + 1)
        if not word:
            # At once: there is nothing to put in order.
            os._exit(0)
        *files, reply = handed
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (orders, woken, wakes, *children.values()):
                each.close()
            os.close(reply)
            worker.main(*files, parent=me)
        for each in files:
            os.close(each)
        children[pid] = socket.socket(fileno=reply)
        _tell(children[pid], pid)


def _tell_ended(children: dict[int, socket.socket]) -> None:
    for pid in list(children):
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            reply = children.pop(pid)
            _tell(reply, os.waitstatus_to_exitcode(status))
            reply.close()


def _tell(reply: socket.socket, number: int) -> None:
    try:
        reply.send(NUMBER.pack(number))
    except OSError:
        # Whoever asked has gone away.
        return
