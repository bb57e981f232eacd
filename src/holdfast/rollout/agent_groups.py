"""Groups of agents that act together, and what follows them: audits, and recorders of their states."""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, Protocol, cast, runtime_checkable

import torch
from tensordict import TensorDict

from holdfast.types import Int, Tensor
from holdfast.worlds import Step
from holdfast.worlds.step import ALL, PartialStep, as_slice, concat, select


@runtime_checkable
class StepAudit(Protocol):
    """What sees every step of a rollout before the policy acts; of a recorded one, all at once after it."""

    def on_step(self, step: Step, rows: slice | Tensor = ALL) -> None:
        """See a step of some agents."""

    def log_resets(self, length: int) -> None:
        """Prepare for rollouts of so many steps that are recorded."""

    def log_step(self, t: int) -> None:
        """Step `t` of a rollout is recorded next."""

    def on_rollout(self, steps: TensorDict) -> None:
        """See the steps `[A,L]` of a recorded rollout."""


class AgentGroup(NamedTuple):
    """Agents that act together: all of them in a synchronous world."""

    agent_ids: Int[Tensor, " N"] | None
    """On the CPU; none: all agents."""
    rows: slice | Tensor
    t: int | Tensor
    """Their step in the rollout: one number if all agents share it, else `[N]` on the CPU."""
    step: Step


def async_groups(
    groups: Sequence[Int[Tensor, " _"]], next_step: Step, length: int, recv: Callable[[], PartialStep]
) -> Generator[AgentGroup, None, Step]:
    """Yield the agents that are ready to act, first all of `next_step`, `length` times each; return their next step."""
    counts, device = torch.zeros(len(next_step.reward), dtype=torch.long), next_step.reward.device
    ready = deque(PartialStep(rows, select(next_step, rows)) for rows in groups)
    finished, num_finished = list[PartialStep](), 0
    while num_finished < len(counts):
        group = ready.popleft() if ready else recv()
        t = counts[group.rows]
        done = (t >= length).nonzero().flatten()
        if len(done):
            finished.append(PartialStep(group.rows[done], select(group.step, done)))
            num_finished += len(done)
            acting = (t < length).nonzero().flatten()
            if not len(acting):
                continue
            group, t = PartialStep(group.rows[acting], select(group.step, acting)), t[acting]
        common = int(t[0]) if bool((t == t[0]).all()) else t
        yield AgentGroup(group.rows, as_slice(group.rows, device), common, group.step)
        counts[group.rows] += 1
    return concat(finished)


class EntryStateRecorder:
    """The states of all agents before step `at` of each segment, `[A,S]`."""

    def __init__(self, read: Callable[[], TensorDict], agent: Tensor, length: int, horizon: int, at: int) -> None:
        self._read, self._agent, self._horizon, self._at = read, agent, horizon, at
        self.states = cast("TensorDict", read()[:, None].expand(len(agent), length // horizon).clone())

    def record(self, rows: slice | Tensor, t: int | Tensor) -> None:
        """Copy the states of the agents that are before step `at` of a segment."""
        if isinstance(t, int):
            if t % self._horizon == self._at:
                self.states[rows, t // self._horizon] = self._read()[rows]
            return
        due = (t % self._horizon == self._at).nonzero().flatten()
        if len(due):
            agent = self._agent[rows][due.to(self._agent.device)]
            self.states[agent, (t[due] // self._horizon).to(self._agent.device)] = self._read()[agent]
