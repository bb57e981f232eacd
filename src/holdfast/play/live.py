"""LivePlay: agents that act while their memory is cleared, frozen, swapped or restored."""

import base64
import threading
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from holdfast.errors import ConfigError, HoldfastError, one_line
from holdfast.play.play_loop import PlayLoop, Row, trim_tokens
from holdfast.report.frames import as_webp
from holdfast.report.replay import ReplayHeader, encode_arrays
from holdfast.types import Tensor

HISTORY = 400
"""Steps that are kept for the page."""
SPEEDS = (0.5, 64.0)
"""Steps a second: least and most."""
MODES = ("intact", "frozen", "cleared")
"""What happens to a memory at every step: nothing; it stays as it is until the episode ends; it is cleared."""
Mode = Literal["intact", "frozen", "cleared"]
Leaves = Mapping[str, Tensor]


class Command(BaseModel):
    """What a page or a terminal asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    do: Literal["play", "pause", "step", "speed", "greedy", "clear", "mode", "swap", "remember", "restore"]
    agent: int = Field(default=0, ge=0)
    other: int = Field(default=0, ge=0)
    """The agent to swap with."""
    count: int = Field(default=1, ge=1, le=1000)
    """Number of steps."""
    speed: float = Field(default=8.0, ge=SPEEDS[0], le=SPEEDS[1])
    greedy: bool = True
    mode: Mode = "intact"


class Mark(BaseModel):
    """A change of memories before a step."""

    t: int
    agents: Annotated[list[int], Field(max_length=2)]
    what: str


class LivePlay:
    """Agents that act step by step or on their own, and changes of their memories.

    Memories change between two steps only. An episode counts as changed if anything was done to the agent's memory
    in it, else as left alone.
    """

    def __init__(self, loop: PlayLoop, header: ReplayHeader) -> None:
        self.loop, self.header = loop, header
        self.lock = threading.RLock()
        self.playing, self.speed = False, 8.0
        self.modes: list[Mode] = ["intact"] * loop.follow
        self.total, self.marks, self.error = 0, deque[Mark](maxlen=200), ""
        self.before: dict[int, list[int]] = {}
        """Action probabilities at this step before the memory of an agent changed."""
        self._rows = deque[Row](maxlen=HISTORY)
        self._now: Row | None = None
        self._remembered: dict[int, Leaves] = {}
        self._returns, self._changed = np.zeros(loop.follow), np.zeros(loop.follow, np.bool_)
        self._tally = {False: [0, 0.0], True: [0, 0.0]}
        """Number of finished episodes and sum of their returns; with a changed memory, and without."""

    def run(self, command: Command) -> None:
        """Do what a command says; what is impossible is a ConfigError."""
        with self.lock:
            for agent in (command.agent, command.other):
                if agent >= self.loop.follow:
                    raise ConfigError(f"There is no agent {agent}; there are agents 0 to {self.loop.follow - 1}.")
            if command.do in ("play", "pause"):
                self.playing = command.do == "play" and not self.error
            elif command.do == "step":
                self.playing = False
                for _ in range(command.count):
                    self.advance()
            elif command.do == "speed":
                self.speed = command.speed
            elif command.do == "greedy":
                self.loop.greedy, self._now = command.greedy, None
            else:
                self._change_memory(command)

    def advance(self) -> Row:
        """Take one step of all agents."""
        with self.lock:
            session = self.loop.session
            cleared, frozen = (
                [a for a, mode in enumerate(self.modes) if mode == name] for name in ("cleared", "frozen")
            )
            if cleared:
                session.reset(cleared)
            memory = self._leaves(frozen) if frozen else {}
            row = self._with_places(self.loop.step())
            # As in evaluations: an episode's first state is the one that stays.
            rest = [number for number, agent in enumerate(frozen) if not row["first"][agent]]
            if rest:
                session.edit([frozen[number] for number in rest], {name: leaf[rest] for name, leaf in memory.items()})
            self._rows.append(row)
            self.total, self._now, self.before = self.total + 1, None, {}
            self._count(row)
            return row

    def now(self) -> Row:
        """Return what the agents see and would do now."""
        with self.lock:
            if self._now is None:
                self._now = self._with_places(self.loop.now())
            return self._now

    def last(self) -> Row | None:
        """Return the last step."""
        return self._rows[-1] if self._rows else None

    def tally(self) -> dict[str, tuple[int, float]]:
        """Return number and mean return of finished episodes, with memory left alone and changed."""
        names = {"alone": False, "changed": True}
        return {
            name: (count, total / max(count, 1)) for name, key in names.items() for count, total in [self._tally[key]]
        }

    def state(self, since: int = 0) -> dict[str, Any]:
        """Return all that a page shows, with the steps from `since` on, as JSON."""
        with self.lock:
            first = max(since, self.total - len(self._rows))
            rows = list(self._rows)[len(self._rows) - (self.total - first) :] if first < self.total else []
            frame = self.loop.frame()
            return {
                "total": self.total,
                "first": first,
                "rows": _encode(rows) if rows else None,
                "now": _encode([self.now()]),
                "grid": encode_arrays({"grid": self.loop.grid()[0]})["grid"] if self.loop.kinds else None,
                "frame": None if frame is None else base64.b64encode(as_webp(frame)).decode(),
                "playing": self.playing,
                "speed": self.speed,
                "greedy": self.loop.greedy,
                "modes": self.modes,
                "remembered": sorted(self._remembered),
                "before": {str(agent): probs for agent, probs in self.before.items()},
                "marks": [mark.model_dump() for mark in self.marks],
                "tally": self.tally(),
                "error": self.error,
            }

    def play_until(self, stop: threading.Event) -> None:
        """Take steps at the chosen speed while `playing`; an error pauses and is shown."""
        while not stop.wait(1 / self.speed):
            try:
                with self.lock:
                    if self.playing:
                        self.advance()
            except HoldfastError as error:
                self.playing, self.error = False, one_line(error)

    def _change_memory(self, command: Command) -> None:
        """Change the memory of an agent, and note its action probabilities before."""
        session, agent = self.loop.session, command.agent
        if not self.header.memory:
            raise ConfigError(f"{self.header.policy} has no memory that could be changed.")
        if command.do == "remember":
            self._remembered[agent] = self._leaves([agent])
            return
        if command.do == "restore" and agent not in self._remembered:
            raise ConfigError(f"No state of agent {agent} is remembered; remember one first.")
        agents = [agent, command.other] if command.do == "swap" else [agent]
        if len(set(agents)) < len(agents):
            raise ConfigError(f"Agent {agent} cannot be swapped with itself; choose another one.")
        now = self.now()
        if "probs" in now:
            # The probabilities before the first change of this step.
            self.before = {each: now["probs"][each].tolist() for each in agents} | self.before
        if command.do == "clear":
            session.reset([agent])
        elif command.do == "mode":
            self.modes[agent] = command.mode
        elif command.do == "swap":
            session.edit(agents, {name: leaf.flip(0) for name, leaf in self._leaves(agents).items()})
        else:
            session.edit([agent], self._remembered[agent])
        self._now = None
        self._changed[agents] = True
        modes = {"intact": "intact again", "frozen": "frozen", "cleared": "cleared at every step"}
        words = {"mode": modes[command.mode], "swap": f"swapped with agent {command.other}", "clear": "cleared"}
        self.marks.append(Mark(t=self.total, agents=agents, what=words.get(command.do, "restored")))

    def _leaves(self, agents: list[int]) -> dict[str, Tensor]:
        return {name: leaf[agents] for name, leaf in self.loop.session.memory.items()}

    def _with_places(self, row: Row) -> Row:
        return row | {"places": self.loop.grid()[1]} if self.loop.kinds else row

    def _count(self, row: Row) -> None:
        self._returns += row["reward"]
        for agent in row["end"].nonzero()[0]:
            tally = self._tally[bool(self._changed[agent])]
            tally[0], tally[1] = tally[0] + 1, tally[1] + float(self._returns[agent])
            self._returns[agent] = 0.0
            self._changed[agent] = self.modes[agent] != "intact"


def _encode(rows: list[Row]) -> dict[str, Any]:
    """Return rows as the arrays of a replay."""
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    if "tokens" in arrays:
        arrays["tokens"] = trim_tokens(arrays["tokens"])
    return encode_arrays(arrays)
