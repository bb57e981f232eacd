"""Somebody who looks on while a run goes on, and tells what was seen once an iteration."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase

from holdfast.experience import Segments
from holdfast.monitor.cells import live_state
from holdfast.monitor.gradients import norms_by_module, reach_back, reach_metrics
from holdfast.monitor.held import Held, bytes_of, counting_graph
from holdfast.monitor.remembered import remembered
from holdfast.monitor.resets import Resets
from holdfast.policies import LSTMWrapper
from holdfast.saved import taken
from holdfast.shapes import Bool, Tensor
from holdfast.values import due
from holdfast.worlds import Step


class Observer:
    """Counts resets in every step, measures states and bytes in every iteration, gradients in some.

    `often` says in which: `first`, `every:N` or `off`, as `trainer.check` does.
    """

    def __init__(self, policy: LSTMWrapper, agents: int, often: str, *, total_steps: int) -> None:
        self._policy, self._often = policy, often
        self._resets = Resets(policy, agents)
        self._held = Held(total_steps, next(policy.parameters()).device)
        self._graph: int | None = None
        self._looked: dict[str, int | float] = {}
        self._norms: dict[str, Tensor] = {}

    def saw(self, step: Step, rows: slice | Tensor) -> None:
        """Hear what the world said to some, before the policy does."""
        self._resets.saw(step, rows)

    def listening(self) -> AbstractContextManager[None]:
        """Hear the clears of a rollout."""
        return self._resets.listening()

    def look(self, segments: Segments, iteration: int) -> "Observer | None":
        """Look at a rollout before weights change; in some iterations the update is looked at, too."""
        if not due(self._often, iteration):
            return None
        if self._policy.has_memory():
            self._looked |= reach_metrics(reach_back(self._policy, segments))
        return self

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Count what the first minibatch keeps for its backward."""
        with counting_graph(self._policy) as graph:
            yield
        self._graph = graph.bytes

    def saw_gradients(self, policy: LSTMWrapper) -> None:
        """Measure the gradients of each part, before they are clipped."""
        self._norms = dict(norms_by_module(policy))

    def take(self, segments: Segments, global_step: int) -> dict[str, int | float]:
        """Tell what was seen since the last call."""
        found = {
            **self._resets.take(),
            **remembered(self._policy, self._resets.age),
            **self._held.take(
                buffer=bytes_of(*_parts(segments)),
                state=bytes_of(live_state(self._policy)) if self._policy.has_memory() else 0,
                graph=self._graph,
                global_step=global_step,
            ),
            **self._looked,
            **self._told_norms(),
        }
        self._looked = {}
        return found

    def state(self) -> dict[str, Any]:
        """Say what was seen and is not told yet."""
        return {"resets": self._resets.state(), "graph": self._graph}

    def restore(self, saved: Any, global_step: int) -> None:
        """Go on from there; how memory grows is a matter of this process, from this step on."""
        self._resets.restore(taken(saved, "resets", dict))
        self._graph = None if saved["graph"] is None else taken(saved, "graph", int)
        self._held.begin(global_step)

    def forget(self, who: Bool[Tensor, " A"]) -> None:
        """Let some begin anew."""
        self._resets.forget(who)

    def alarm(self) -> str:
        """Say in one line if memory grows; otherwise nothing."""
        return self._held.alarm()

    def _told_norms(self) -> dict[str, float]:
        if not self._norms:
            return {}
        numbers = torch.stack(list(self._norms.values())).tolist()
        found = dict(zip(self._norms, numbers, strict=True))
        self._norms = {}
        return found


def _parts(segments: Segments) -> list[TensorDictBase]:
    lead = segments.lead
    return [
        segments.steps,
        segments.entry,
        segments.tail,
        *(() if lead is None else (lead.steps, lead.entry)),
    ]
