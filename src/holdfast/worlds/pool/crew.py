"""The workers of a pool together: asked at the same time, told apart when something goes wrong."""

import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError
from holdfast.shapes import Int, Shaped, Tensor
from holdfast.worlds import draws
from holdfast.worlds.pool.line import GRACE_S, Line, LostError
from holdfast.worlds.pool.nursery import nursery
from holdfast.worlds.pool.shared import Layout, open_memory
from holdfast.worlds.pool.worker import Around, Piece
from holdfast.worlds.pool.worker_error import WorkerError

MAKING_S = 300.0
"""How long it may take to make worlds: to load what they need, too."""
SHOWN = 24
"""Actions that an error lists."""


@dataclass(frozen=True)
class Blueprint:
    """A world by its name, and what it is made with."""

    name: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Order:
    """What the agents of a share are to do, and where what comes of it is written."""

    share: int
    slot: int
    actions: Shaped[Tensor, "N ..."]
    clock: int
    """Which step of the share it is."""

    @property
    def words(self) -> dict[str, Any]:
        """What a worker is told; the actions it finds in memory."""
        kind = {"dtype": self.actions.dtype, "shape": tuple(self.actions.shape[1:])}
        return {"share": self.share, "slot": self.slot, **kind}


class Crew:
    """Processes with one piece of every share each. One that is lost is an error, or started anew."""

    def __init__(
        self,
        plan: Blueprint,
        shares: tuple[Int[Tensor, " _"], ...],
        workers: int,
        *,
        seed: int,
        timeout: float,
        restart: bool,
        say: Callable[[str], object],
    ) -> None:
        self._plan, self._shares, self._seed = plan, shares, seed
        self._timeout, self._restart, self.say = timeout, restart, say
        self.each = len(shares[0]) // workers
        """Agents of a piece."""
        self.lives = [0] * workers
        """How often each was started anew."""
        self.layout: Layout | None = None
        self.losses: Path | None = None
        """A file for what lost workers said."""
        self.memory = open_memory()
        self.clocks = [0] * len(shares)
        """How many steps each share has taken."""
        self._orders: list[deque[Order]] = [deque() for _ in range(workers)]
        # Who has done nothing yet: started anew in vain, it is not started again.
        self._new = [True] * workers
        self._lost: WorkerError | None = None
        self.lines, held = list[Line](), ExitStack()
        self.close = weakref.finalize(self, _end, self.lines, self.memory, held)
        self._nursery = held.enter_context(nursery())
        self.lines.extend(Line(self._nursery, self.memory, timeout) for _ in range(workers))

    def require_whole(self) -> None:
        """Raise again what was raised when a worker was lost: the others may still be busy."""
        if self._lost is not None:
            raise self._lost

    def all(self, what: str, each: Callable[[int], dict[str, Any]] | None = None, **words: Any) -> list[Any]:
        """Let every worker do something at the same time; give their answers."""
        self.require_whole()
        for number, line in enumerate(self.lines):
            self._guarded(number, line.ask, what, **words, **({} if each is None else each(number)))
        patience = MAKING_S if what == "make" else 0.0
        return [self._guarded(number, line.hear, patience) for number, line in enumerate(self.lines)]

    def one(self, number: int, what: str, **words: Any) -> Any:
        """Let one worker do something."""
        self._guarded(number, self.lines[number].ask, what, **words)
        return self._guarded(number, self.lines[number].hear, MAKING_S if what == "make" else 0.0)

    def pieces(self, number: int) -> list[Piece]:
        """List the pieces of the world that live in a worker, one of each share."""
        seed, life = self._seed, self.lives[number]
        if life:
            # It must not live again what ended it.
            seed = draws.seed_of(seed, draws.STREAM_RESTARTED, life)
        whole = self.each == sum(map(len, self._shares))
        return [
            Piece(self._plan.name, dict(self._plan.options), int(rows[0]), len(rows), seed, whole)
            for rows in self.rows_of(number)
        ]

    def plan_of(self, number: int) -> dict[str, Any]:
        """Say what a worker makes, and where."""
        return {"pieces": self.pieces(number), "around": Around.here()}

    def rows_of(self, number: int) -> list[Int[Tensor, " _"]]:
        """List the agents of a worker, share by share."""
        return [rows[number * self.each : (number + 1) * self.each] for rows in self._shares]

    def relive(self, number: int, life: int) -> None:
        """Let a worker live another life: as often started anew as in a run that goes on."""
        self.lives[number] = life
        self._begin(number, fresh=False)

    def begin_step(self, share: int, slot: int, actions: Shaped[Tensor, "N ..."]) -> None:
        """Let the agents of a share act."""
        self.require_whole()
        self.clocks[share] += 1
        order = Order(share, slot, actions, self.clocks[share])
        for number, line in enumerate(self.lines):
            self._orders[number].append(order)
            try:
                line.ask("step", **order.words)
            except LostError as lost:
                # It was lost in what it was told to do first.
                self._replace(number, self._error(number, lost, self._orders[number][0]))

    def end_step(self) -> list[int]:
        """Wait until all have done the oldest order; name those who were started anew instead."""
        return [number for number in range(len(self.lines)) if self._was_new(number)]

    def states(self) -> list[list[dict[str, Any] | None]]:
        """Ask where every world is; those of a worker that is started anew are nowhere yet."""
        self.require_whole()
        return [self._state(number) for number in range(len(self.lines))]

    def _state(self, number: int) -> list[dict[str, Any] | None]:
        try:
            self.lines[number].ask("state")
            return self.lines[number].hear()
        except LostError as lost:
            self._replace(number, self._error(number, lost))
            return [None] * len(self._shares)

    def _was_new(self, number: int) -> bool:
        while True:
            try:
                new_here = self.lines[number].hear()
            except LostError as lost:
                self._replace(number, self._error(number, lost, self._orders[number][0]))
                continue
            self._orders[number].popleft()
            if not new_here:
                self._new[number] = False
            return new_here

    def _begin(self, number: int, *, fresh: bool) -> None:
        self.one(number, "make", **self.plan_of(number))
        self.one(number, "reset")
        self.one(number, "show", layout=self.layout, place=number, fresh=fresh)

    def _replace(self, number: int, error: WorkerError) -> None:
        """Start a worker anew, if that is wanted and the last time led anywhere; else raise."""
        if self._restart and self._new[number]:
            first, *more = str(error).split("\n")
            error = WorkerError(
                "\n".join([f"{first} It did nothing since it was started: not again.", *more])
            )
        if not self._restart or self._new[number]:
            self._lost = error
            raise error
        self.lines[number].kill()
        self.lines[number] = Line(self._nursery, self.memory, self._timeout)
        self.lives[number] += 1
        self._new[number] = True
        try:
            self._begin(number, fresh=True)
        except ConfigError as wrong:
            raise WorkerError(f"{error}\nStarted anew: {wrong}") from error
        for each in self._orders[number]:
            self._guarded(number, self.lines[number].ask, "step", **each.words)
        agents = self.each * len(self._shares)
        line = f"{str(error).splitlines()[0]} Started anew: its {agents} agents begin new episodes."
        if self.losses is not None:
            with self.losses.open("a") as file:
                file.write(f"{error}\n\n")
            line += f" What it said is in {self.losses}."
        self.say(line)

    def _guarded(self, number: int, call: Callable[..., Any], *words: Any, **named: Any) -> Any:
        try:
            return call(*words, **named)
        except LostError as lost:
            self._lost = self._error(number, lost)
            raise self._lost from None

    def _error(self, number: int, lost: LostError, order: Order | None = None) -> WorkerError:
        pieces = self.rows_of(number)
        pieces = pieces if order is None else [pieces[order.share]]
        agents = " and ".join(f"{int(rows[0])} to {int(rows[-1])}" for rows in pieces)
        told = f"Worker {number} of {len(self.lines)} ({self._plan.name}, agents {agents}) {lost.how}"
        if order is not None:
            begin = number * self.each
            mine = order.actions[begin : begin + self.each].tolist()
            more = f" and {len(mine) - SHOWN} more" if len(mine) > SHOWN else ""
            told += f"; step {order.clock}, last actions {mine[:SHOWN]}{more}"
        return WorkerError(f"{told}." + (f"\n{lost.where}" if lost.where else ""))


def _end(lines: list[Line], memory: int, held: ExitStack) -> None:
    """End all workers: together, so that nobody waits for one after the other."""
    with held:
        for line in lines:
            line.end()
        until = time.monotonic() + GRACE_S
        for line in lines:
            line.gone(until)
        lines.clear()
        os.close(memory)
