"""When a loss or a gradient is not finite: what it was, whose, and when."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from holdfast.experience import Segments
from holdfast.experience.finite import (
    NotFiniteError,
    agents_told,
    not_finite_in,
    require_finite_weights,
    some_of,
)
from holdfast.learn.objective import loss_of
from holdfast.learn.replay import replay
from holdfast.learn.targets import Targets
from holdfast.learn.teachers import Heard
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Int, Tensor
from holdfast.trainer_knobs import PPO
from holdfast.worlds.seen import leaves_of

KEPT = "the weights are those before this minibatch"


@dataclass(frozen=True)
class Fault:
    """A minibatch whose loss or gradient is not finite."""

    policy: LSTMWrapper
    segments: Segments
    index: Int[Tensor, " rows"]
    rows: Segments
    """The rows of that index, as they were learnt from."""
    targets: Targets
    ppo: PPO
    anchors: Sequence[Tensor]
    lessons: Sequence[Heard]

    def tell(self, when: str, at_once: int) -> None:
        """Raise with the name of what is not finite, the steps and the agents; so many rows fit at once.

        Looked at in the order of cause and effect: weights, what was stored, what was learnt from, what
        teachers and the policy say, the terms of the loss, their gradients.
        """
        self.policy.zero_grad(set_to_none=True)
        require_finite_weights(self.policy, when)
        seen = leaves_of(self.rows.steps["env_obs"])
        stored = {"env_obs" if len(seen) == 1 else f"env_obs.{n}": leaf for n, leaf in enumerate(seen)}
        stored |= {key: self.rows.steps[key] for key in ("rewards", "values", "act_log_prob")}
        stored |= {"advantages": self.targets.advantages, "returns": self.targets.returns}
        for lesson in self.lessons:
            stored |= {
                f"{name} of teacher {lesson.name}": getattr(lesson, name) for name in ("told", "values")
            }
        self._tell_first(stored, when)
        pieces = torch.arange(len(self.rows), device=self.index.device).split(at_once)
        with torch.no_grad():
            again = [replay(self.policy, self.rows.rows(piece)) for piece in pieces]
        keys = ("act_log_prob", "values", "entropy")
        self._tell_first({key: torch.cat([each[key] for each in again]) for key in keys}, when)
        what = some_of(self._named(pieces)) or "the loss, of terms that are: a weight of theirs is too large"
        whose = self._whose() or "no row of it alone"
        raise NotFiniteError(f"{when}: not finite: {what}; {whose}; {KEPT}.")

    def _tell_first(self, named: dict[str, Tensor], when: str) -> None:
        """Raise for the first of some tensors `[B,T,...]` that is not finite where somebody acts."""
        valid, each = self.rows.steps["valid"], self.segments.each
        for name, tensor in named.items():
            bad = ~tensor.reshape(*valid.shape, -1).isfinite().all(-1) & valid
            if bool(bad.any()):
                row, step = (int(part) for part in bad.nonzero()[0])
                agents = sorted({int(number) // each for number in self.index[bad.any(1)]})
                raise NotFiniteError(
                    f"{when}: {name} is not finite: {agents_told(agents)}, first "
                    f"{self.segments.place(int(self.index[row]), step)}; {KEPT}."
                )

    def _named(self, pieces: Sequence[Tensor]) -> list[str]:
        """Name the terms and the gradients that are not finite, piece by piece."""
        for piece in pieces:
            terms = self._backward(piece)
            grads = {name: w.grad for name, w in self.policy.named_parameters() if w.grad is not None}
            named = not_finite_in({name: term for name, term in terms.items() if name.startswith("losses/")})
            named += [f"the gradient of {name}" for name in not_finite_in(grads)]
            self.policy.zero_grad(set_to_none=True)
            if named:
                return named
        return []

    def _whose(self) -> str:
        """Find whose rows alone give a gradient that is not finite."""
        agents = set()
        for place, row in enumerate(self.index.tolist()):
            self._backward(torch.tensor([place], device=self.index.device))
            grads = {str(n): w.grad for n, w in enumerate(self.policy.parameters()) if w.grad is not None}
            if not_finite_in(grads):
                agents.add(row // self.segments.each)
            self.policy.zero_grad(set_to_none=True)
        return agents_told(sorted(agents)) if agents else ""

    def _backward(self, piece: Int[Tensor, " rows"]) -> dict[str, Tensor]:
        heard = [lesson.rows(piece) for lesson in self.lessons]
        loss, report, _ = loss_of(
            self.policy,
            self.rows.rows(piece),
            self.targets.rows(piece),
            self.ppo,
            anchors=self.anchors,
            heard=heard,
        )
        loss.backward()
        return report
