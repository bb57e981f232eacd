"""Teachers: trained policies that are distilled into the student (kickstarting)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.config.trainer import TeacherConfig
from holdfast.errors import ContractError
from holdfast.policies import LSTMWrapper
from holdfast.rollout.segments import POLICY_INPUTS, Segments, policy_td
from holdfast.types import Bool, Float, Int, Tensor
from holdfast.worlds import WorldSpec


@dataclass(frozen=True)
class TeacherOutput:
    """A teacher's outputs for each step of a rollout, and the current weights of its losses."""

    name: str
    params: Float[Tensor, "B T params"]
    values: Float[Tensor, "B T"]
    action: float
    value: float

    def rows(self, index: Int[Tensor, " rows"]) -> "TeacherOutput":
        """Select rows."""
        return TeacherOutput(self.name, self.params[index], self.values[index], self.action, self.value)


class Teacher:
    """A frozen policy that is run over every step of every agent, in order.

    Its weights never change, so one pass per rollout is enough and its states are never stale: they carry
    over between rollouts and are cleared at episode starts.
    """

    def __init__(
        self,
        name: str,
        policy: LSTMWrapper,
        config: TeacherConfig,
        *,
        agents: int,
        batch_size: int,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.files = files or {}
        """The files that rebuild it on resume."""
        self.name, self.policy, self.config = name, policy.eval().requires_grad_(False), config
        self._slices = {start: min(batch_size, agents - start) for start in range(0, agents, batch_size)}
        policy.store.allocate(self._slices)

    def require_same_actions(self, student: LSTMWrapper) -> None:
        """Raise if the teacher's action distribution is not the student's."""
        if self.policy.actions != student.actions:
            raise ContractError(
                f"Teacher {self.name} has the action distribution {self.policy.actions}, the student "
                f"{student.actions}; they must be the same."
            )

    def unknown_names(self, spec: WorldSpec) -> str:
        """Name in one line the actions that the teacher lacks, and so gives probability 0; "" if none."""
        names = self.policy.binding.actions
        missing = [name for name in spec.action_names if names and name not in names]
        if not missing:
            return ""
        return f"teacher {self.name} does not have the actions {', '.join(missing)}; their probability is 0."

    @torch.no_grad()
    def run(self, segments: Segments, global_step: int) -> TeacherOutput | None:
        """Run the teacher over a rollout; none once its weight is 0."""
        weight = anneal_teacher(global_step, self.config.steps, self.config.anneal)
        if weight == 0 or self.config.action == self.config.value == 0:
            return None
        steps = segments.steps.select(*POLICY_INPUTS, "actions").unflatten(0, segments.agent_shape)
        slices = (
            torch.stack([self._forward(steps[start : start + length, k], start) for k in range(steps.shape[1])], dim=1)
            for start, length in self._slices.items()
        )
        outputs = cast("TensorDict", torch.cat([*slices])).flatten(0, 1)
        params, values = outputs[self.policy.actions.key], outputs["values"]
        return TeacherOutput(self.name, params, values, weight * self.config.action, weight * self.config.value)

    def reset_agents(self, mask: Bool[Tensor, " A"]) -> None:
        """Reset the teacher's states of restarted agents."""
        for start, length in self._slices.items():
            self.policy.store.reset_slice(start, mask[start : start + length])

    def _forward(self, steps: TensorDictBase, start: int) -> TensorDictBase:
        outputs = self.policy(policy_td(steps.select(*POLICY_INPUTS), start=start), action=steps["actions"])
        return outputs.select(self.policy.actions.key, "values")


def anneal_teacher(step: int, steps: int, share: float) -> float:
    """Weight of a teacher: 1, then linearly to 0 over the last `share` of its steps."""
    if step >= steps:
        return 0.0
    left = 1 - step / steps
    return 1.0 if left >= share else left / share
