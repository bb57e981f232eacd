"""Teachers: trained policies that are imitated for a while, each with a memory of its own."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from holdfast.errors import ContractError
from holdfast.experience import Segments
from holdfast.experience.segments import READ
from holdfast.learn.teaching import anneal_teacher
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Bool, Float, Int, Tensor
from holdfast.trainer_knobs import Teacher
from holdfast.worlds import WorldSpec


@dataclass(frozen=True)
class Heard:
    """What a teacher says of each step, and how much that weighs by now."""

    name: str
    told: Float[Tensor, "B T told"]
    values: Float[Tensor, "B T"]
    action: float
    value: float

    def rows(self, index: Int[Tensor, " rows"]) -> "Heard":
        """Take some rows."""
        return Heard(self.name, self.told[index], self.values[index], self.action, self.value)


class Lesson:
    """A teacher that sees every step of every agent, in order, and remembers it as it learnt to.

    Its weights never change, so what it says of a rollout is computed once, and its memory is never stale:
    it lives on from rollout to rollout, and is cleared where episodes begin.
    """

    def __init__(
        self,
        name: str,
        policy: LSTMWrapper,
        knobs: Teacher,
        *,
        agents: int,
        at_once: int,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.files = files or {}
        """By which it is built again."""
        self.name, self.policy, self.knobs = name, policy.eval().requires_grad_(False), knobs
        self._slices = {start: min(at_once, agents - start) for start in range(0, agents, at_once)}
        policy.store.open(self._slices)

    def require_same_actions(self, student: LSTMWrapper) -> None:
        """Refuse a teacher whose actions are not the student's."""
        if self.policy.actions != student.actions:
            raise ContractError(
                f"Teacher {self.name} tells its actions as {self.policy.actions}, the policy that learns as "
                f"{student.actions}; they must be of one kind."
            )

    def unknown(self, spec: WorldSpec) -> str:
        """Say in one line which actions it does not know; it says of them that they are never taken."""
        known = self.policy.binding.actions
        missing = [name for name in spec.action_names if known and name not in known]
        if not missing:
            return ""
        return f"teacher {self.name} does not know {', '.join(missing)}: it teaches never to do that."

    @torch.no_grad()
    def hear(self, segments: Segments, global_step: int) -> Heard | None:
        """Let the teacher live through a rollout; nothing is heard once its weight is 0."""
        weight = anneal_teacher(global_step, self.knobs.steps, self.knobs.anneal)
        if weight == 0 or self.knobs.action == self.knobs.value == 0:
            return None
        steps = segments.steps.select(*READ, "actions").unflatten(0, segments.by_agent)
        answers = [
            [self._answer(steps[start : start + length, k], start) for k in range(segments.each)]
            for start, length in self._slices.items()
        ]
        told, values = (
            torch.cat([torch.stack([each[part] for each in row], dim=1) for row in answers]).flatten(0, 1)
            for part in (0, 1)
        )
        return Heard(self.name, told, values, weight * self.knobs.action, weight * self.knobs.value)

    def forget(self, who: Bool[Tensor, " A"]) -> None:
        """Let the teacher forget some agents, who begin anew."""
        for start, length in self._slices.items():
            self.policy.store.reset_slice(start, who[start : start + length])

    def _answer(self, steps: TensorDictBase, start: int) -> tuple[Tensor, Tensor]:
        td = steps.select(*READ)
        td["training_env_id_start"] = torch.full(td.batch_size, start, dtype=torch.long)
        answer = self.policy(td, action=steps["actions"])
        return answer[self.policy.actions.key], answer["values"]


def heard_by(lessons: Sequence[Lesson], segments: Segments, global_step: int) -> Iterator[Heard]:
    """Let all teachers whose time has not passed live through a rollout."""
    for lesson in lessons:
        heard = lesson.hear(segments, global_step)
        if heard is not None:
            yield heard
