"""Worker processes of a pool: requests, replies, timeouts, crashes and restarts."""

import os
import pickle
import signal
import socket
import struct
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from holdfast import rng
from holdfast.errors import AgentCountError, ConfigError, MakeError, WorkerError, record_error, with_note
from holdfast.trust import current_source
from holdfast.types import Int, Shaped, Tensor
from holdfast.worlds.workers.shared_memory import Layout, open_memory
from holdfast.worlds.workers.spawn import SERVER_GONE, ForkServer, fork_server
from holdfast.worlds.workers.worker import ProcessContext, Shard

GRACE_S = 2.0
"""Time limit for a worker to exit by itself."""
STACK_DUMP_S = 0.3
"""Time for a hanging worker to write its stack."""
MAX_CRASH_OUTPUT = 1 << 16
"""Bytes of crash output that are read."""


class WorkerCrashError(Exception):
    """A worker raised, hung or died."""

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.reason, self.traceback = reason, traceback


class WorkerConnection:
    """One worker process and the connection to it."""

    def __init__(self, server: ForkServer, memory: int, timeout: float) -> None:
        self._timeout = timeout
        local, remote = socket.socketpair()
        # A hanging worker neither reads nor writes: limit both directions like a reply.
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            local.setsockopt(socket.SOL_SOCKET, option, limit)
        self._output_file = open_memory()
        with local, remote:
            try:
                self.process = server.spawn((remote.fileno(), memory, self._output_file))
            except BaseException:
                os.close(self._output_file)
                raise
            self._pipe = Connection(os.dup(local.fileno()))

    def request(self, name: str, **args: Any) -> None:
        """Send a request, without waiting for the reply."""
        try:
            self._pipe.send_bytes(pickle.dumps((name, args)))
        except BlockingIOError:
            raise self._timed_out(self._timeout) from None
        except OSError:
            raise self._died() from None

    def receive(self, timeout: float = 0.0) -> Any:
        """Wait for a reply, at least for the worker timeout; raise if the worker fails or dies."""
        timeout = max(timeout, self._timeout)
        try:
            # A second at a time: time in which the trainer was suspended does not count.
            seconds, rest = divmod(timeout, 1.0)
            if not any(self._pipe.poll(wait) for wait in (rest, *[1.0] * int(seconds))):
                raise self._timed_out(timeout)
            kind, content = pickle.loads(self._pipe.recv_bytes())
        except BlockingIOError:
            raise self._timed_out(self._timeout) from None
        except (EOFError, OSError):
            raise self._died() from None
        if kind == "agent_count":
            raise AgentCountError(*content)
        if kind == "make":
            message, traceback = content
            raise with_note(MakeError(message), traceback)
        if kind == "config":
            raise ConfigError(content)
        if kind == "error":
            raise WorkerCrashError(f"failed: {content[0].rstrip('.')}", content[1])
        return content

    def end(self) -> None:
        """Request its exit."""
        try:
            self._pipe.send_bytes(pickle.dumps(("end", {})))
        except OSError:
            # It has exited, or does not read.
            self.process.signal(signal.SIGKILL)

    def join(self, deadline: float) -> None:
        """Wait for its exit until the deadline, then kill it."""
        if self._pipe.closed:
            return
        if self.process.exit_code(deadline - time.monotonic()) is None:
            self.process.signal(signal.SIGKILL)
            self.process.exit_code(GRACE_S)
        self._pipe.close()
        self.process.close()
        os.close(self._output_file)

    def kill(self) -> None:
        """Kill its process."""
        self.process.signal(signal.SIGKILL)
        self.join(time.monotonic() + GRACE_S)

    def _timed_out(self, timeout: float) -> WorkerCrashError:
        # faulthandler writes the stack on this signal.
        self.process.signal(signal.SIGUSR1)
        time.sleep(STACK_DUMP_S)
        return WorkerCrashError(f"did not answer within {timeout:g} seconds", self._crash_output())

    def _died(self) -> WorkerCrashError:
        code = self.process.exit_code(GRACE_S)
        if code is None:
            reason = "closed its connection to the trainer"
        elif code == SERVER_GONE:
            reason = "ended with its fork server"
        elif code < 0:
            reason = f"was ended by {signal.Signals(-code).name}"
        else:
            reason = f"ended with exit code {code}"
        return WorkerCrashError(reason, self._crash_output())

    def _crash_output(self) -> str:
        os.lseek(self._output_file, 0, os.SEEK_SET)
        return os.read(self._output_file, MAX_CRASH_OUTPUT).decode(errors="replace").strip()


MAKING_S = 300.0
"""Time limit for making worlds, with their imports."""
MAX_LISTED_ACTIONS = 24
"""Actions that an error lists."""


@dataclass(frozen=True)
class StepRequest:
    """A step of one group: its actions, and the memory slot of its result."""

    group: int
    slot: int
    actions: Shaped[Tensor, "N ..."]
    clock: int
    """Number of the group's step."""

    @property
    def message(self) -> dict[str, Any]:
        """Arguments of `Worker.step`; the actions are in shared memory."""
        schema = {"dtype": self.actions.dtype, "shape": tuple(self.actions.shape[1:])}
        return {"group": self.group, "slot": self.slot, **schema}


class WorkerGroup:
    """Worker processes, each with one shard of every group; crashed ones raise or are restarted."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        groups: tuple[Int[Tensor, " _"], ...],
        workers: int,
        *,
        first_agent: int | None = None,
        seed: int,
        timeout: float,
        restart: bool,
        log: Callable[[str], object],
    ) -> None:
        self._first_agent = first_agent
        self._name, self._options, self._groups, self._seed = name, dict(options), groups, seed
        self._name_source = replace(current_source(), imported=frozenset(sys.modules))
        self._timeout, self._restart, self.log = timeout, restart, log
        self.shard_size = len(groups[0]) // workers
        """Agents of a shard."""
        self.restart_counts = [0] * workers
        """Restarts of each worker."""
        self.layout: Layout | None = None
        self.crash_log: Path | None = None
        """File for the errors of crashed workers."""
        self.memory = open_memory()
        self.clocks = [0] * len(groups)
        """Steps of each group."""
        self._requests: list[deque[StepRequest]] = [deque() for _ in range(workers)]
        # Workers without a completed step: if these crash, a restart would only repeat it.
        self._is_new = [True] * workers
        self._crash: WorkerError | None = None
        self.connections, resources = list[WorkerConnection](), ExitStack()
        self.close = weakref.finalize(self, _end, self.connections, self.memory, resources)
        self._fork_server = resources.enter_context(fork_server())
        self.connections.extend(WorkerConnection(self._fork_server, self.memory, timeout) for _ in range(workers))

    def raise_crash(self) -> None:
        """Raise the error of a crashed worker again: other workers may be in the middle of a step."""
        if self._crash is not None:
            raise self._crash

    def request_all(self, name: str, args_of: Callable[[int], dict[str, Any]] | None = None, **args: Any) -> list[Any]:
        """Send a request to every worker, and return their replies."""
        self.raise_crash()
        for number, connection in enumerate(self.connections):
            with self._crash_is_final(number):
                connection.request(name, **args, **({} if args_of is None else args_of(number)))
        return [self._receive(number, name) for number in range(len(self.connections))]

    def make_args(self, number: int) -> dict[str, Any]:
        """Return the arguments of `Worker.make`: one shard of each group."""
        seed, restarts = self._seed, self.restart_counts[number]
        if restarts:
            # A restarted worker must not run into the same crash.
            seed = rng.derive_seed(seed, rng.STREAM_RESTARTED, restarts)
        is_whole = self._first_agent is None and self.shard_size == sum(map(len, self._groups))
        first = self._first_agent or 0
        shards = [
            Shard(self._name, self._options, first + int(rows[0]), len(rows), seed, is_whole, self._name_source)
            for rows in self.rows_of(number)
        ]
        return {"shards": shards, "context": ProcessContext.current()}

    def rows_of(self, number: int) -> list[Int[Tensor, " _"]]:
        """Return the agents of a worker, group by group."""
        start = number * self.shard_size
        return [rows[start : start + self.shard_size] for rows in self._groups]

    def restart_as(self, number: int, restarts: int) -> None:
        """Make a worker's worlds again with the restart count of a resumed run, which decides their seed."""
        self.restart_counts[number] = restarts
        self._start(number, restarted=False)

    def begin_step(self, group: int, slot: int, actions: Shaped[Tensor, "N ..."]) -> None:
        """Start the step of a group."""
        self.raise_crash()
        self.clocks[group] += 1
        request = StepRequest(group, slot, actions, self.clocks[group])
        for number, connection in enumerate(self.connections):
            self._requests[number].append(request)
            try:
                connection.request("step", **request.message)
            except WorkerCrashError as crash:
                # It failed in its oldest outstanding request.
                self._replace(number, self._error(number, crash, self._requests[number][0]))

    def end_step(self) -> list[int]:
        """Wait for the oldest step of all workers; return those that were restarted instead."""
        return [number for number in range(len(self.connections)) if self._end_step_of(number)]

    def states(self) -> list[list[dict[str, Any] | None]]:
        """Return the states of all worlds; None for those of a worker that is restarted."""
        self.raise_crash()
        states = list[list[dict[str, Any] | None]]()
        for number in range(len(self.connections)):
            try:
                self.connections[number].request("state")
                states.append(self.connections[number].receive())
            except WorkerCrashError as crash:
                self._replace(number, self._error(number, crash))
                states.append([None] * len(self._groups))
        return states

    def _end_step_of(self, number: int) -> bool:
        while True:
            try:
                restarted = self.connections[number].receive()
            except WorkerCrashError as crash:
                self._replace(number, self._error(number, crash, self._requests[number][0]))
                continue
            self._requests[number].popleft()
            if not restarted:
                self._is_new[number] = False
            return restarted

    def _start(self, number: int, *, restarted: bool) -> None:
        attach = {"layout": self.layout, "index": number, "restarted": restarted}
        for name, args in (("make", self.make_args(number)), ("reset", {}), ("attach", attach)):
            with self._crash_is_final(number):
                self.connections[number].request(name, **args)
            self._receive(number, name)

    def _replace(self, number: int, error: WorkerError) -> None:
        """Restart a crashed worker; raise if restarts are off, or if it crashed in its first step."""
        if self._restart and self._is_new[number]:
            error.args = (f"{error} It completed no step since its start, so it is not restarted.",)
        if not self._restart or self._is_new[number]:
            self._crash = error
            raise error
        self.connections[number].kill()
        self.connections[number] = WorkerConnection(self._fork_server, self.memory, self._timeout)
        self.restart_counts[number] += 1
        self._is_new[number] = True
        try:
            self._start(number, restarted=True)
        except ConfigError as config_error:
            error.args = (f"{error} Restarted: {config_error}",)
            raise error from config_error
        with self._crash_is_final(number):
            for request in self._requests[number]:
                self.connections[number].request("step", **request.message)
        agents = self.shard_size * len(self._groups)
        line = f"{error} Restarted: its {agents} agents start new episodes."
        self.log(line if self.crash_log is None else f"{line} {record_error(error, self.crash_log)}")

    def _receive(self, number: int, name: str) -> Any:
        with self._crash_is_final(number):
            return self.connections[number].receive(MAKING_S if name == "make" else 0.0)

    @contextmanager
    def _crash_is_final(self, number: int) -> Iterator[None]:
        """Raise a crash of a worker as a WorkerError, now and in all later calls."""
        try:
            yield
        except WorkerCrashError as crash:
            self._crash = self._error(number, crash)
            raise self._crash from None

    def _error(self, number: int, crash: WorkerCrashError, request: StepRequest | None = None) -> WorkerError:
        rows_of = self.rows_of(number)
        rows_of = rows_of if request is None else [rows_of[request.group]]
        agents = " and ".join(f"{int(rows[0])} to {int(rows[-1])}" for rows in rows_of)
        worker = f"Worker {number} of {len(self.connections)} ({self._name}, agents {agents})"
        message = f"{worker} {crash.reason}"
        if request is not None:
            start = number * self.shard_size
            actions = request.actions[start : start + self.shard_size].tolist()
            rest = len(actions) - MAX_LISTED_ACTIONS
            more = f" and {rest} more" if rest > 0 else ""
            message += f"; step {request.clock}, last actions {actions[:MAX_LISTED_ACTIONS]}{more}"
        error = WorkerError(f"{message}.")
        return with_note(error, crash.traceback) if crash.traceback else error


def _end(connections: list[WorkerConnection], memory: int, resources: ExitStack) -> None:
    """End all workers, at the same time."""
    with resources:
        for connection in connections:
            connection.end()
        deadline = time.monotonic() + GRACE_S
        for connection in connections:
            connection.join(deadline)
        connections.clear()
        os.close(memory)
