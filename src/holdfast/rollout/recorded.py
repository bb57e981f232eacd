"""Rollouts as CUDA graphs: one for each segment, replayed from the second rollout on."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import proxy

import torch
from tensordict import TensorDict

from holdfast import cuda_graphs
from holdfast.cuda_graphs import CannotRecordError, OverwrittenError, Replay, is_recording
from holdfast.object_state import ObjectState, clone_leaves, copy_leaves, module_settings
from holdfast.object_state import tree_leaves as leaves_of
from holdfast.recorded_call import RecordedCall
from holdfast.rng import generator_of, restored_generators, set_generator
from holdfast.types import Tensor
from holdfast.worlds import Step
from holdfast.worlds.checked_world import CheckedWorld, non_finite_rows
from holdfast.worlds.step import ALL, AsyncWorld

if TYPE_CHECKING:
    from holdfast.rollout.collector import Collector

MAX_SEGMENTS = 32
"""Rollouts of more are not recorded: recording them would take longer than it saves."""
MAX_RECORDINGS = 8
"""Rollouts that must be recorded more often than this, because world or policy are changed, are not any more."""
TOLERANCE, SHARE = 1e-3, 1e-3
"""Relative size of a rounding error, and the share of numbers that may be further apart: where a replay rounds
otherwise, a few agents sample another action."""


class RecordedRollout:
    """Replays the rollouts of a collector.

    The first rollout runs step by step. Before the second, its segments are recorded; the first of them is replayed,
    and compared with the same one step by step. What cannot be recorded runs step by step; one line says why.
    """

    def __init__(self, collector: "Collector", log: Callable[[str], None]) -> None:
        # Not kept by what it holds itself: its memory is free as soon as the collector is.
        self._collector = cast("Collector", proxy(collector))
        self._log = log
        world = collector.world
        self._world = world.world if type(world) is CheckedWorld else world
        self._is_off = self._is_initialized = False
        self._replays = list[Replay]()
        self._recordings = 0
        self._policy = list[Any]()
        self._count = RecordedCall[None](is_on=True)

    def is_ready(self) -> bool:
        """Return whether the next rollout can be replayed; record it if it is time to."""
        if self._is_off:
            return False
        if not self._is_initialized:
            # The first rollout initializes all that is made when it is first used.
            self._is_initialized = True
            return False
        if self._replays and self._policy == self._current_policy() and self._state.is_as_recorded():
            return True
        try:
            self._record()
        except CannotRecordError as error:
            self._is_off, self._replays = True, []
            self._log(f"rollouts run step by step, not as CUDA graphs: {error}.")
            return False
        if not self._policy:
            self._log("rollouts are replayed as CUDA graphs")
        self._policy = self._current_policy()
        return True

    def collect(self, draws: Tensor) -> list[TensorDict]:
        """Replay a rollout that acts by the given uniform numbers; return the states that were recorded on the way."""
        collector, after = self._collector, self._next_step
        self._draws.copy_(draws)
        self._state.load()
        if collector.next_step is not after:
            copy_leaves(after, collector.next_step)
            collector.next_step = after
        with collector.timer.timing("rollout"):
            for replay in self._replays:
                replay()
        self._state.store_counters()
        if type(collector.world) is CheckedWorld:
            collector.world.begin_rollout(collector.length)
        self._count(self._count_steps, collector.steps, after)
        return [recorder.states for recorder in self._recorders]

    def _count_steps(self, steps: TensorDict, after: Step) -> None:
        """Count episodes and resets, and check what the world returned, for all steps at once."""
        collector, world = self._collector, self._collector.world
        rewards = torch.cat([steps["rewards"][:, 1:], after.reward[:, None]], dim=1)
        ended = (steps["dones"] | steps["truncateds"])[:, 1:]
        ended = torch.cat([ended, (after.terminated | after.truncated)[:, None]], dim=1)
        collector.episodes.on_rollout(steps["valid"], rewards, ended)
        if collector.audit is not None:
            collector.audit.on_rollout(steps)
        if type(world) is CheckedWorld:
            world.check_rollout(steps, after, self._last_obs_ok)

    def _record(self) -> None:
        collector, world = self._collector, self._collector.world
        count = collector.length // collector.horizon
        if isinstance(world, AsyncWorld):
            raise CannotRecordError("the agents act in groups")
        if count > MAX_SEGMENTS:
            raise CannotRecordError(f"a rollout has {count} segments, more than {MAX_SEGMENTS}")
        if self._recordings == MAX_RECORDINGS:
            raise CannotRecordError(f"numbers or tensors that they need have changed {MAX_RECORDINGS} times")
        self._recordings += 1
        device, self._state = collector.next_step.reward.device, ObjectState(self._world, type(self._world).__name__)
        with restored_generators(self._state.generators, device):
            self._record_and_compare(count, device)

    def _record_and_compare(self, count: int, device: torch.device) -> None:
        collector, store, world = self._collector, self._collector.policy.store, self._collector.world
        self._draws, self._recorders = collector.draws.clone(), collector.entry_recorders()
        self._last_obs_ok = torch.ones_like(collector.steps["valid"])
        # A world may write its next step into the same tensors.
        pending = clone_leaves(collector.next_step)
        self._next_step: Step = clone_leaves(pending)
        if collector.audit is not None:
            collector.audit.log_resets(collector.length)
        memory, generator = store.read(0, world.agents).clone(), generator_of(device)
        try:
            with cuda_graphs.preparing(), store.scratch(world.agents):
                store.write(0, memory)
                self._segment(0)
                expected = [*self._results(), *(leaf.clone() for leaf in leaves_of(store.read(0, world.agents)))]
        finally:
            # The world goes back to where it was, whatever the segment raises.
            self._state.find_changes(device)
        copy_leaves(self._next_step, pending)
        expected += self._state.expected()
        try:
            self._replays = self._record_segments(count, device)
        except OverwrittenError:
            collector.copies_steps = True
            self._replays = self._record_segments(count, device)
        self._state.load()
        before = [leaf.clone() for leaf in self._state.leaves()]
        set_generator(generator, device)
        self._replays[0]()
        actual = [*self._results(), *leaves_of(store.read(0, world.agents)), *self._state.leaves()]
        reason = _difference(expected, actual)
        # The rollout starts where it would have.
        for leaf, saved in zip(self._state.leaves(), before, strict=True):
            leaf.copy_(saved)
        copy_leaves(self._next_step, pending)
        store.write(0, memory)
        if reason:
            raise CannotRecordError(reason)

    def _record_segments(self, count: int, device: torch.device) -> list[Replay]:
        return [cuda_graphs.record(partial(self._recorded_segment, number), device) for number in range(count)]

    def _recorded_segment(self, number: int) -> None:
        with self._state.recorded():
            self._segment(number)

    def _segment(self, number: int) -> None:
        """Act for the steps of a segment, from `self._next_step`, which is replaced by the step after them."""
        collector, step = self._collector, self._next_step
        for t in range(number * collector.horizon, (number + 1) * collector.horizon):
            for recorder in self._recorders:
                recorder.record(ALL, t)
            if is_recording() and collector.audit is not None:
                collector.audit.log_step(t)
            outputs = collector.act(step, (ALL, t), self._draws[:, t])
            step = self._world.step(collector.policy.env_actions(outputs["actions"]))
            if step.last_obs is not None:
                self._last_obs_ok[:, t] = ~non_finite_rows(step.last_obs, step.truncated)
        if is_recording():
            collector.store_recorded(number * collector.horizon)
        copy_leaves(self._next_step, step, "a step")

    def _results(self) -> list[Tensor]:
        """Return what the first segment stored, but for observations, which may be large, and the step after it."""
        steps = self._collector.steps[:, : self._collector.horizon]
        stored = [leaf for key, value in steps.items() if key != "env_obs" for leaf in leaves_of(value)]
        return [leaf.clone() for leaf in (*stored, *leaves_of(self._next_step))]

    def _current_policy(self) -> list[Any]:
        """Return what graphs read of the policy: where its tensors and the live states are, and its numbers."""
        policy = self._collector.policy
        return [*module_settings(policy), [leaf.data_ptr() for leaf in leaves_of(policy.store.view(0))]]


def _difference(expected: list[Tensor], actual: list[Tensor]) -> str:
    """Return how a replay differs from what was recorded by more than rounding; "": it does not."""
    for one, other in zip(expected, actual, strict=True):
        one, other = one.double(), other.double()
        differs = ~((one - other).abs() <= TOLERANCE * one.abs().clamp(min=1)) & ~(
            (one == other) | (one.isnan() & other.isnan())
        )
        share = float(differs.double().mean()) if differs.numel() else 0.0
        if share > SHARE:
            return f"its replay gives other numbers ({share:.1%} of them); the world may use numbers of the host"
    return ""
