"""Fork server: a process that has imported everything once; every worker is a fork of it.

`multiprocessing`'s forkserver runs the caller's `__main__` again in every child: a script that calls
`holdfast.train()` without `if __name__ == "__main__"` fails with "before the current process has finished its
bootstrapping phase". Its server also dies of a SIGTERM sent to the process group (a scheduler's, `timeout`'s)
and takes the workers with it before the trainer has saved.
"""

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

from holdfast.errors import WorkerError

SERVER_CODE = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    # The trainer handles these and ends its processes itself.
    signal.signal(number, signal.SIG_IGN)
from holdfast.worlds.workers.spawn import serve
serve(int(sys.argv[1]))
"""
STDERR = 2
LOADING_S = 300.0
"""Time limit for the imports of the fork server."""
CLOSING_S = 2.0
NUMBER = struct.Struct("i")
SERVER_GONE = 1 << 16
"""In place of the exit code of a worker whose fork server has died: it dies too, and its code is lost."""


class Child:
    """A worker process: its pid and exit code."""

    def __init__(self, reply: socket.socket, server: subprocess.Popen[bytes]) -> None:
        self._reply, self._server = reply, server
        self._exit_code: int | None = None
        pid = self._receive(LOADING_S)
        if pid is None or pid == SERVER_GONE:
            raise WorkerError(
                "The fork server starts no workers: its error is printed above. Start the run again, or "
                "train without workers: trainer.num_workers=0."
            )
        self.pid = pid

    def exit_code(self, timeout: float) -> int | None:
        """Wait for its end; return its exit code or minus the signal. None: it is still running."""
        if self._exit_code is None:
            self._exit_code = self._receive(max(0.0, timeout))
        if self._exit_code is None and self._server.poll() is not None:
            self._exit_code = SERVER_GONE
        return self._exit_code

    def signal(self, number: int) -> None:
        """Send it a signal, if it is running."""
        if self.exit_code(0.0) is None:
            os.kill(self.pid, number)

    def close(self) -> None:
        """Close the socket to the fork server."""
        self._reply.close()

    def _receive(self, timeout: float) -> int | None:
        # Not settimeout: there 0 means non-blocking, and a signal may interrupt the wait.
        if not select.select([self._reply], [], [], timeout)[0]:
            return None
        data = self._reply.recv(NUMBER.size)
        return NUMBER.unpack(data)[0] if data else SERVER_GONE


class ForkServer:
    """The trainer's side of the fork server, which exits when closed or when the trainer is gone.

    Every worker has a socket of its own for its pid and, in the end, its exit code. A caller that is
    interrupted while waiting leaves nothing that the next one could read as its reply.
    """

    def __init__(self) -> None:
        self._requests, server_end = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER_CODE, str(server_end.fileno())],
            pass_fds=[server_end.fileno()],
            stdin=subprocess.DEVNULL,
            # Prints of worlds must not mix with the trainer's output.
            stdout=STDERR,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        server_end.close()

    @property
    def alive(self) -> bool:
        """Whether it can start workers."""
        return self._process.poll() is None

    def spawn(self, files: Sequence[int]) -> Child:
        """Start a worker that inherits these file descriptors."""
        reply, server_end = socket.socketpair()
        try:
            with server_end:
                socket.send_fds(self._requests, [b"."], [*files, server_end.fileno()])
            return Child(reply, self._process)
        except OSError as error:
            reply.close()
            raise WorkerError("The fork server of the workers has died.") from error
        except BaseException:
            reply.close()
            raise

    def close(self) -> None:
        """End the fork server."""
        self._requests.close()
        try:
            self._process.wait(CLOSING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_users: list[ForkServer] = []
"""The fork server of this process, once for each of its users."""
_users_lock = threading.Lock()


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Return the fork server of this process; it runs as long as it has a user."""
    with _users_lock:
        server = next((server for server in _users if server.alive), None) or ForkServer()
        _users.append(server)
    try:
        yield server
    finally:
        with _users_lock:
            _users.remove(server)
            if server not in _users:
                server.close()


def serve(requests_fd: int) -> NoReturn:
    """Fork workers and report their exit codes until the trainer is gone (runs in the fork server)."""
    # Imported here, so that the trainer does not import it.
    from holdfast.worlds.workers import worker

    requests, children = socket.socket(fileno=requests_fd), dict[int, socket.socket]()
    server_pid = os.getpid()
    # SIGCHLD wakes up the select below.
    wakeup, wakeup_sender = socket.socketpair()
    wakeup_sender.setblocking(False)
    signal.set_wakeup_fd(wakeup_sender.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(1 << 12)
            _report_exits(children)
        if requests not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(requests, 1, worker.FILES + 1)
        if not data:
            os._exit(0)
        *files, reply = fds
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for inherited in (requests, wakeup, wakeup_sender, *children.values()):
                inherited.close()
            os.close(reply)
            worker.main(*files, parent=server_pid)
        for file in files:
            os.close(file)
        children[pid] = socket.socket(fileno=reply)
        _send(children[pid], pid)


def _report_exits(children: dict[int, socket.socket]) -> None:
    for pid in list(children):
        exited, status = os.waitpid(pid, os.WNOHANG)
        if exited:
            with children.pop(pid) as reply:
                _send(reply, os.waitstatus_to_exitcode(status))


def _send(reply: socket.socket, number: int) -> None:
    try:
        reply.send(NUMBER.pack(number))
    except OSError:
        # The trainer has closed its end.
        return
