"""Timeline of the states of a few agents over the last two rollouts of a run, across the update between them."""

import os
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tensordict import TensorDict

from holdfast.errors import ConfigError, one_line, writing
from holdfast.learn.replay import state_after
from holdfast.monitor.agent_trace import AgentTrace
from holdfast.monitor.state_audit import same_randomness, state_norms
from holdfast.policies import LSTMWrapper
from holdfast.rollout import Segments
from holdfast.types import Float, Tensor

FILE = "timeline.json"
AGENT = 42
"""The agent whose rollouts are also described line by line, and two of the five others precede it."""
AGENTS, STEPS = 6, 128
"""Agents, and steps on either side of the update, rounded up to segments."""
MAX_BYTES = 1 << 20
MAX_STEPS = 1 << 14

Opening = Literal["terminated", "truncated", "start"]
Step = Annotated[int, Field(ge=0, le=10**15)]
Size = Annotated[float, Field(ge=0, le=1e30, allow_inf_nan=False)]
Line = Annotated[str, Field(max_length=500)]


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AgentTimeline(_Saved):
    """One agent: the norm of its state after every step, and what happened at steps, counted from the first one."""

    agent: Annotated[int, Field(ge=0, le=10**9)]
    norms: Annotated[list[Size], Field(max_length=MAX_STEPS)]
    starts: Annotated[list[tuple[Step, Opening]], Field(max_length=MAX_STEPS)]
    """Steps that open an episode, and how the one before ended."""


class Timeline(_Saved):
    """States of a few agents over consecutive steps."""

    version: Literal[1] = 1
    first_step: Step
    """Number of the first step, from the start of the run, of each agent."""
    horizon: Annotated[int, Field(ge=1, le=10**9)]
    update: Step | None = None
    """The step, counted from the first one, before which the weights were updated."""
    agents: Annotated[list[AgentTimeline], Field(min_length=1, max_length=64)]
    drift: Annotated[list[Size], Field(max_length=MAX_STEPS)] = []
    """After the update: mean relative distance of the states from those that the new weights compute throughout."""
    trace: Annotated[list[Line], Field(max_length=4096)] = []
    """The rollouts of one agent, line by line."""


def read_timeline(folder: Path) -> Timeline | None:
    """Read and validate the timeline of a run's folder; None: there is none."""
    file = folder / FILE
    if not file.is_file():
        return None
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{FILE} is larger than {MAX_BYTES:,} bytes, so it is not that of a run")
        return Timeline.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{FILE} is not a timeline of version 1: {where} {first['msg']}") from None
    except OSError as error:
        raise ConfigError(f"{FILE} cannot be read: {one_line(error)}") from None


class TimelineRecorder:
    """Records the last two rollouts, each before its update, so that its weights are those that made it.

    Weights, live states and random generators do not change.
    """

    def __init__(self, policy: LSTMWrapper, agents: int, horizon: int, iterations: int) -> None:
        self._policy, self._horizon, self._iterations = policy, horizon, iterations
        first = AGENT - 2 if agents >= AGENT + AGENTS - 2 else 0
        self._agents = list(range(first, min(agents, first + AGENTS)))
        self._trace = AgentTrace(policy, agents, AGENT if AGENT in self._agents else self._agents[0])
        self._rows: Segments | None = None
        """Rows of the first rollout, to compute its states again with the weights of the second."""
        self.timeline: Timeline | None = None

    @torch.no_grad()
    def record(self, segments: Segments, iteration: int) -> None:
        """Record a rollout, if it is one of the last two; iterations are counted from 0."""
        left = self._iterations - iteration
        if left > 2 or not self._policy.has_memory():
            return
        count, T = segments.segments_per_agent, self._horizon
        shown = min(count, -(-STEPS // T))
        # The steps next to the update: the last ones of the first rollout, the first ones of the second.
        start = count - shown if left == 2 else 0
        index = torch.tensor([agent * count + start + k for agent in self._agents for k in range(shown)])
        rows = segments.rows(index.to(segments.version.device))
        rows = Segments(rows.steps.clone(), rows.entry_state.clone(), rows.tail.clone(), rows.version)
        trace = [line[:500] for line in self._trace.rollout(segments, iteration)]
        with same_randomness(self._policy):
            norms, drift = self._states(rows, shown)
        first_step = (iteration * count + start) * T
        self.timeline = self._append(rows, norms, drift, first_step, trace)
        self._rows = rows

    def _states(self, rows: Segments, shown: int) -> tuple[Float[Tensor, "A N"], list[float]]:
        """Return the norm of each state after each step; after an update also the drift."""
        agents = len(self._agents)
        steps = rows.steps.unflatten(0, (agents, shown))
        state = cast("TensorDict", rows.entry_state.unflatten(0, (agents, shown))[:, 0])
        before = self._rows
        if before is not None:
            earlier = before.steps.unflatten(0, (agents, -1))
            fresh = cast("TensorDict", before.entry_state.unflatten(0, (agents, -1))[:, 0])
            for k in range(earlier.shape[1]):
                fresh = state_after(self._policy, earlier[:, k], fresh)
            state = cast("TensorDict", torch.cat([state, fresh]))
        norms, drift = list[Tensor](), list[Tensor]()
        for k in range(shown):
            for t in range(self._horizon):
                step = steps[:, k, t : t + 1]
                step = step if before is None else cast("TensorDict", torch.cat([step, step]))
                state = state_after(self._policy, step, state)
                norms.append(state_norms(state)[:agents])
                if before is not None:
                    distance = state_norms(state[:agents].apply(torch.sub, state[agents:]))
                    drift.append((distance / state_norms(state)[agents:].clamp(min=1e-6)).mean())
        return torch.stack(norms, dim=1).cpu(), torch.stack(drift).tolist() if drift else []

    def _append(self, rows: Segments, norms: Tensor, drift: list[float], first_step: int, trace: list[str]) -> Timeline:
        before = self.timeline
        offset = 0 if before is None else len(before.agents[0].norms)
        agents = []
        for number, agent in enumerate(self._agents):
            earlier = None if before is None else before.agents[number]
            agents.append(
                AgentTimeline(
                    agent=agent,
                    norms=[*(earlier.norms if earlier else []), *norms[number].nan_to_num(0.0).tolist()],
                    starts=[*(earlier.starts if earlier else []), *self._starts(rows, number, offset)],
                )
            )
        return Timeline(
            first_step=first_step if before is None else before.first_step,
            horizon=self._horizon,
            update=None if before is None else offset,
            agents=agents,
            drift=[min(max(number, 0.0), 1e30) if number == number else 0.0 for number in drift],
            trace=trace if before is None else [*before.trace, "Update · weights changed", *trace],
        )

    def _starts(self, rows: Segments, number: int, offset: int) -> list[tuple[int, Opening]]:
        steps = rows.steps.unflatten(0, (len(self._agents), -1))[number].flatten(0, 1)
        first, done, cut = (steps[key].tolist() for key in ("first", "dones", "truncateds"))
        kinds: list[Opening] = [
            "terminated" if done[t] else "truncated" if cut[t] else "start" for t in range(len(first))
        ]
        return [(offset + t, kind) for t, (kind, is_first) in enumerate(zip(kinds, first, strict=True)) if is_first]


def write_timeline(timeline: Timeline, folder: Path) -> None:
    """Write the timeline of a run, whole or not at all."""
    new = folder / f".{FILE}.part"
    with writing(folder / FILE):
        new.write_text(timeline.model_dump_json())
        os.replace(new, folder / FILE)
