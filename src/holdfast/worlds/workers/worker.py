"""Worker process: holds one shard of the world per group, and steps it on request.

Started by the fork server; exits on request or when the trainer process is gone.
"""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from holdfast.errors import (
    AgentCountError,
    ConfigError,
    HoldfastError,
    MakeError,
    located_error_text,
    one_line,
    user_traceback,
)
from holdfast.trust import NameSource, names_from
from holdfast.worlds.checked_world import CheckedWorld
from holdfast.worlds.make import close_world, make_world
from holdfast.worlds.save_restore import restore_world, save_world
from holdfast.worlds.step import Restarted, Shardable, Step, WorldSpec
from holdfast.worlds.workers.shared_memory import Layout, SharedBuffers, SharedSchema, schema_of, write_step

FILES = 3
"""File descriptors of a worker: its connection to the trainer, the shared memory, the crash output."""
PR_SET_PDEATHSIG = 1
"""Linux prctl option: send a signal when the parent exits."""
PARENT_CHECK_S = 0.5


@dataclass(frozen=True)
class Shard:
    """The agents of one group in one worker."""

    name: str
    options: dict[str, Any]
    first_agent: int
    agents: int
    seed: int
    is_whole_world: bool
    name_source: NameSource


@dataclass(frozen=True)
class ProcessContext:
    """Working directory, Python path and environment variables of the trainer."""

    folder: str
    path: list[str]
    environment: dict[str, str]

    @classmethod
    def current(cls) -> "ProcessContext":
        """Return that of this process."""
        return cls(os.getcwd(), list(sys.path), dict(os.environ))

    def apply(self) -> None:
        """Set it in this process."""
        os.chdir(self.folder)
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)


class Worker:
    """Executes the trainer's requests, one after the other."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._worlds: list[CheckedWorld] = []
        self._first_steps: list[Step] = []
        self._rows = slice(0)
        # Groups whose next step is the reset of a restarted worker.
        self._restarted: set[int] = set()
        self._buffers: SharedBuffers | None = None

    def make(self, shards: Sequence[Shard], context: ProcessContext) -> WorldSpec:
        """Make the worlds; return their spec."""
        context.apply()
        self.close()
        self._worlds = [_make_shard(shard) for shard in shards]
        return self._worlds[0].spec

    def reset(self) -> SharedSchema:
        """Start every agent's first episode; return the schema of a step."""
        self._first_steps = [world.reset() for world in self._worlds]
        self._restarted = set()
        return schema_of(self._first_steps[0])

    def attach(self, layout: Layout | None, index: int, *, restarted: bool) -> None:
        """Map the shared memory and write the first steps; `restarted`: return them from `step` instead."""
        if layout is not None:
            self._buffers = layout.map(self._memory)
        agents = self._worlds[0].agents
        self._rows = slice(index * agents, (index + 1) * agents)
        if restarted:
            self._restarted = set(range(len(self._worlds)))
            return
        for group, step in enumerate(self._first_steps):
            self._write(step, group, 0)

    def step(self, group: int, slot: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Step the agents of a group; return whether they were reset instead, after a restart."""
        assert self._buffers is not None
        if group in self._restarted:
            self._restarted.discard(group)
            self._write(self._first_steps[group], group, slot)
            return True
        # Copied: a world may keep its actions.
        actions = self._buffers.actions(group, dtype, shape)[self._rows].clone()
        self._write(self._worlds[group].step(actions), group, slot)
        return False

    def state(self) -> list[dict[str, Any] | None]:
        """Return the state of every world; None for one that has not returned its reset."""
        return [None if group in self._restarted else save_world(world) for group, world in enumerate(self._worlds)]

    def restore(self, states: Sequence[dict[str, Any] | None]) -> list[Restarted | None]:
        """Restore the worlds."""
        self._restarted = set()
        return [restore_world(world, state) for world, state in zip(self._worlds, states, strict=True)]

    def close(self) -> None:
        """Close the worlds."""
        for world in self._worlds:
            close_world(world.world)
        self._worlds = []

    def _write(self, step: Step, group: int, slot: int) -> None:
        assert self._buffers is not None
        write_step(step, self._buffers.step(group, slot), self._rows)


def _make_shard(shard: Shard) -> CheckedWorld:
    with names_from(shard.name_source):
        world = make_world(shard.name, shard.agents, seed=shard.seed, device="cpu", **shard.options)
    if isinstance(world, Shardable):
        world.set_agent_offset(shard.first_agent)
    elif not shard.is_whole_world:
        raise ConfigError(
            f"{shard.name} cannot be split over several workers or groups: it has no "
            "set_agent_offset(first_agent). Type trainer.num_workers=1 trainer.async_factor=1."
        )
    return CheckedWorld(world, first_agent=shard.first_agent)


def serve(connection: Connection, worker: Worker) -> None:
    """Execute requests until the trainer closes the connection."""
    methods: dict[str, Callable[..., Any]] = {
        name: getattr(worker, name) for name in ("make", "reset", "attach", "step", "state", "restore")
    }
    while True:
        try:
            name, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if name == "end":
            worker.close()
            return
        try:
            reply = pickle.dumps(("done", methods[name](**args)))
        except BaseException as error:
            # Also SystemExit: a world must not end the worker.
            reply = pickle.dumps(_error_reply(error))
        connection.send_bytes(reply)


def _error_reply(error: BaseException) -> tuple[str, Any]:
    """Return the kind and content of an error reply: config errors are raised again in the trainer."""
    if isinstance(error, AgentCountError):
        return "agent_count", (str(error), error.agents_per_env)
    if isinstance(error, MakeError):
        return "make", (str(error), user_traceback(error))
    if isinstance(error, ConfigError):
        return "config", str(error)
    message = one_line(error) if isinstance(error, HoldfastError) else located_error_text(error)
    return "error", (message, user_traceback(error))


def end_with(parent: int) -> None:
    """End this process when the fork server is gone, also while a world hangs."""
    if sys.platform == "linux":
        # By the kernel: a world may hang in C code without releasing the GIL.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=[parent], daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_S)
    os._exit(1)


def main(connection: int, memory: int, crash_output: int, parent: int) -> NoReturn:
    """Run a worker in a forked process, which ignores the signals that the trainer handles."""
    end_with(parent)
    faulthandler.enable(crash_output, all_threads=False)
    faulthandler.register(signal.SIGUSR1, crash_output, all_threads=False)
    torch.set_num_threads(1)
    code = 1
    try:
        serve(Connection(connection), Worker(memory))
        code = 0
    except BrokenPipeError:
        # The trainer has closed its end.
        code = 1
    finally:
        sys.stdout.flush()
        # Not sys.exit: it would wait for threads that a world has left.
        os._exit(code)
