"""A copy of the policy under test in one precision, and the ways to run it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from holdfast.check.adapters.base import PolicyAdapter, RolloutAndReplay, flat
from holdfast.check.compare import RowAxes, State, clone_state, state_leaves
from holdfast.check.held_memory import copy_policy
from holdfast.check.script import Batch, Script, StepBatch
from holdfast.types import Bool, Float, Tensor

AGENTS = 8
"""A multiple of the block size of matrix products, so that permuted rows are bit-equal."""
HORIZON = 8
STEPS = 4 * HORIZON


@dataclass(frozen=True)
class PolicyCopy:
    """A copy of the policy in one precision, which is the default dtype while it runs."""

    adapter: PolicyAdapter
    dtype: torch.dtype
    kind: torch.dtype
    """The dtype its layers compute in: `dtype`, or a coarser one."""
    device: torch.device
    """Its device: inputs are moved there, outputs are moved back to the CPU."""
    unused: PolicyAdapter | None = None
    """A copy of the adapter that never runs; None: the adapter itself is copied."""

    def unused_copy(self) -> "PolicyCopy":
        """Copy the policy as it was before it ran."""
        with self.default_dtype():
            return replace(self, adapter=copy_policy(self.unused or self.adapter))

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        """Make this copy's precision the default dtype."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    @cached_property
    def rows(self) -> RowAxes:
        """The batch axis of each tensor of a state."""
        with self.default_dtype():
            return RowAxes.infer(self.adapter.initial(2), self.adapter.initial(3))

    @cached_property
    def has_no_memory(self) -> bool:
        """Whether the state has no tensors."""
        with self.default_dtype():
            return not state_leaves(self.adapter.initial(2))

    @torch.no_grad()
    def rollout_and_replay(self, script: Script) -> RolloutAndReplay:
        """Run and replay a script as the policy's own trainer does."""
        with self.default_dtype():
            outputs = self.adapter.rollout_and_replay(copy.deepcopy(self.to_policy(script)))
        return RolloutAndReplay(outputs.rollout.cpu(), outputs.replay.cpu())

    @torch.no_grad()
    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Run a script as the policy's own evaluation does."""
        self.adapter.module.eval()
        try:
            with self.default_dtype():
                return self.adapter.evaluate(copy.deepcopy(self.to_policy(script))).cpu()
        finally:
            self.adapter.module.train()

    @torch.no_grad()
    def replay(self, batch: StepBatch, state: State) -> Float[Tensor, "B T K"]:
        """Replay segments from their entry states, with gradients on as in an update."""
        with self.default_dtype():
            with torch.enable_grad():
                outputs = self.adapter.replay(self.to_policy(batch), clone_state(state))
            return flat(outputs, 2).cpu()

    @torch.no_grad()
    def steps(
        self,
        script: Script,
        start: int = 0,
        stop: int | None = None,
        state: State = None,
        reset: Bool[Tensor, "A N1"] | None = None,
    ) -> tuple[Float[Tensor, "A N K"], list[State]]:
        """Act from a state, by default the initial one; return the outputs, and the states before and after steps.

        Where `reset` is true the initial state is put in, besides what the policy does with its flags.
        """
        outputs, states = [], []
        with self.default_dtype():
            state = self.adapter.initial(script.agents) if state is None else state
            script = self.to_policy(script)
            for t in range(start, script.steps if stop is None else stop):
                if reset is not None:
                    state = self.rows.where(reset[:, t], self.adapter.initial(script.agents), state)
                states.append(clone_state(state))
                step_outputs, state = self.adapter.act(script.at(t), clone_state(state))
                outputs.append(flat(step_outputs, 1))
        return torch.stack(outputs, dim=1).cpu(), [*states, clone_state(state)]

    def to_policy(self, batch: Batch) -> Batch:
        """Move a batch to the policy's device and precision."""
        return batch.to(self.dtype, self.device)
