"""A worker: a process in which worlds live, one in each share, and do what they are told.

It is born in the nursery, and ends when it is told to, or when nobody is there any more to tell it anything.
"""

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from holdfast.errors import ConfigError, CrowdError, HoldfastError
from holdfast.worlds.going_on import put_back, state_of
from holdfast.worlds.make import make_world
from holdfast.worlds.pool.shared import Board, Form, Layout, form_of, write_step
from holdfast.worlds.step import Anew, Closes, Step, WorldSpec
from holdfast.worlds.turns import CountsFrom
from holdfast.worlds.watched import Watched

FILES = 3
"""What a worker is born with: its way to the trainer, the memory they share, and a file for last words."""
PR_SET_PDEATHSIG = 1
"""The kernel's word for: a signal when the parent ends."""
ALONE_S = 0.5
"""How often it is looked whether the parent is still there."""


@dataclass(frozen=True)
class Piece:
    """The part of a world that lives in one worker and one share."""

    name: str
    options: dict[str, Any]
    first_agent: int
    agents: int
    seed: int
    whole: bool
    """Whether it is all of the world."""


@dataclass(frozen=True)
class Around:
    """Where the trainer is."""

    folder: str
    path: list[str]
    environment: dict[str, str]

    @classmethod
    def here(cls) -> "Around":
        """Look where this process is."""
        return cls(os.getcwd(), list(sys.path), dict(os.environ))

    def move(self) -> None:
        """Be there."""
        os.chdir(self.folder)
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)


class Worker:
    """Does what the trainer says, one thing after the other."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._worlds: list[Watched] = []
        self._told: list[Step] = []
        self._rows = slice(0)
        self._fresh: set[int] = set()
        self._board: Board | None = None

    def make(self, pieces: Sequence[Piece], around: Around) -> WorldSpec:
        """Make the worlds, where the trainer is; tell what they are like."""
        around.move()
        self.close()
        self._worlds = [_made(piece) for piece in pieces]
        return self._worlds[0].spec

    def reset(self) -> Form:
        """Begin everybody's first episode; tell what a step is made of."""
        self._told = [world.reset() for world in self._worlds]
        self._fresh = set()
        return form_of(self._told[0])

    def show(self, layout: Layout | None, place: int, *, fresh: bool) -> None:
        """Write what everybody was told first; `fresh`: the first answer is to be given by it, too."""
        if layout is not None:
            self._board = layout.map(self._memory)
        count = self._worlds[0].agents
        self._rows = slice(place * count, (place + 1) * count)
        if fresh:
            self._fresh = set(range(len(self._worlds)))
            return
        for share, step in enumerate(self._told):
            self._write(step, share, 0)

    def step(self, share: int, slot: int, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
        """Let the agents of a share act; tell whether they were new here and did not."""
        assert self._board is not None
        if share in self._fresh:
            self._fresh.discard(share)
            self._write(self._told[share], share, slot)
            return True
        # Copied: a world may keep what it is given.
        actions = self._board.actions(share, dtype, shape)[self._rows].clone()
        self._write(self._worlds[share].step(actions), share, slot)
        return False

    def state(self) -> list[dict[str, Any] | None]:
        """Say where each world is; one that is new here is nowhere yet."""
        return [None if share in self._fresh else state_of(world) for share, world in enumerate(self._worlds)]

    def restore(self, states: Sequence[dict[str, Any] | None]) -> list[Anew | None]:
        """Put the worlds back."""
        self._fresh = set()
        return [put_back(world, state) for world, state in zip(self._worlds, states, strict=True)]

    def close(self) -> None:
        """Close the worlds."""
        for world in self._worlds:
            if isinstance(world.world, Closes):
                world.world.close()
        self._worlds = []

    def _write(self, step: Step, share: int, slot: int) -> None:
        assert self._board is not None
        write_step(step, self._board.step(share, slot), self._rows)


def _made(piece: Piece) -> Watched:
    world = make_world(piece.name, piece.agents, seed=piece.seed, device="cpu", **piece.options)
    if isinstance(world, CountsFrom):
        world.count_from(piece.first_agent)
    elif not piece.whole:
        raise ConfigError(
            f"{piece.name} cannot be shared out to several workers or shares: it does not say how a part of "
            "it is made, by count_from(first_agent). Type trainer.num_workers=1 trainer.async_factor=1."
        )
    return Watched(world, first_agent=piece.first_agent)


def serve(way: Connection, worker: Worker) -> None:
    """Do what is told until there is nobody to tell."""
    does: dict[str, Callable[..., Any]] = {
        name: getattr(worker, name) for name in ("make", "reset", "show", "step", "state", "restore")
    }
    while True:
        try:
            what, words = pickle.loads(way.recv_bytes())
        except EOFError:
            return
        if what == "end":
            worker.close()
            return
        try:
            told = pickle.dumps(("done", does[what](**words)))
        except BaseException as error:
            # Also what asks a process to end: a world that does is at fault.
            told = pickle.dumps(_fault(error))
        way.send_bytes(told)


def _fault(error: BaseException) -> tuple[str, Any]:
    """Say what went wrong: a wrong call as it is, anything else in words."""
    if isinstance(error, CrowdError):
        return "crowd", (str(error), error.crowd)
    if isinstance(error, ConfigError):
        return "config", str(error)
    words = " ".join(str(error).split())
    ours = isinstance(error, HoldfastError)
    return "fault", (words if ours else f"{type(error).__name__}: {words}", traceback.format_exc())


def end_with(parent: int) -> None:
    """End this process when the one it is a copy of is gone, also from within a world that hangs."""
    if sys.platform == "linux":
        # Told by the kernel: a world may hang without letting anybody else in this process run.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_look_after, args=[parent], daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _look_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ALONE_S)
    os._exit(1)


def main(way: int, memory: int, last_words: int, parent: int) -> NoReturn:
    """Serve to the end, in a process that was born for it and hears no signals that are for the trainer."""
    end_with(parent)
    faulthandler.enable(last_words, all_threads=False)
    faulthandler.register(signal.SIGUSR1, last_words, all_threads=False)
    torch.set_num_threads(1)
    code = 1
    try:
        serve(Connection(way), Worker(memory))
        code = 0
    except BrokenPipeError:
        # Nobody listens any more.
        code = 1
    finally:
        sys.stdout.flush()
        # Whatever a world left behind, threads of its own too, ends here.
        os._exit(code)
