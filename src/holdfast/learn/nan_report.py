"""Diagnosis of a non-finite loss or gradient: the tensor, the agents and the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from holdfast import ranks
from holdfast.errors import OtherRankError
from holdfast.learn.advantage import Targets
from holdfast.learn.replay import replay
from holdfast.learn.teachers import TeacherOutput
from holdfast.policies import LSTMWrapper
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.rollout import Segments
from holdfast.rollout.nan_checks import NonFiniteError, agent_list, first_few, non_finite_in, require_finite_weights
from holdfast.types import Int, Tensor
from holdfast.worlds.obs import tensors_of

NO_ROW = "no row of it alone"
NOT_ITS_OWN = (NO_ROW, "advantages is not finite")
"""In the report of a rank whose rows may be right: advantages are normalized over all ranks."""
UNCHANGED = "the weights are those before this minibatch"
LossFunction = Callable[[PolicyBatch, Segments, Targets, Sequence[TeacherOutput]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class NonFiniteReport:
    """A minibatch whose loss or gradient is not finite."""

    policy: LSTMWrapper
    segments: Segments
    index: Int[Tensor, " rows"]
    rows: Segments
    """The rows of the minibatch, with refreshed entry states."""
    targets: Targets
    teacher_outputs: Sequence[TeacherOutput]
    loss_function: LossFunction
    """Loss and metrics of outputs, rows, targets and teacher outputs."""

    def raise_of_all_ranks(self, when: str, batch_size: int) -> None:
        """Raise the report of the first rank whose rows explain it; the others raise that it has failed."""
        try:
            self.raise_(when, batch_size)
        except NonFiniteError as error:
            reports = ranks.gather(str(error))
            rank = min(range(len(reports)), key=lambda rank: [word in reports[rank] for word in NOT_ITS_OWN])
            if rank == ranks.rank():
                raise
            raise OtherRankError(f"rank {rank}: {reports[rank]}") from None

    def raise_(self, when: str, batch_size: int) -> None:
        """Raise, naming the first non-finite tensor, its steps and its agents; replays `batch_size` rows a call.

        Checks in causal order: weights, stored steps, targets, outputs of teachers and policy, loss terms, gradients.
        """
        self.policy.zero_grad(set_to_none=True)
        require_finite_weights(self.policy, when)
        obs = tensors_of(self.rows.steps["env_obs"])
        stored = {"env_obs" if len(obs) == 1 else f"env_obs.{n}": leaf for n, leaf in enumerate(obs)}
        stored |= {key: self.rows.steps[key] for key in ("rewards", "values", "act_log_prob")}
        stored |= {"returns": self.targets.returns, "advantages": self.targets.advantages}
        for teacher in self.teacher_outputs:
            stored |= {f"{name} of teacher {teacher.name}": getattr(teacher, name) for name in ("params", "values")}
        self._raise_first(stored, when)
        batches = torch.arange(len(self.rows), device=self.index.device).split(batch_size)
        with torch.no_grad():
            outputs = [replay(self.policy, self.rows.rows(batch)) for batch in batches]
        keys = ("act_log_prob", "values", "entropy")
        self._raise_first({key: torch.cat([output[key] for output in outputs]) for key in keys}, when)
        names = first_few(self._non_finite_terms(batches))
        names = names or "the loss, of finite terms: a coefficient is too large"
        agents = self._agents()
        where = agent_list(agents) if agents else NO_ROW
        raise NonFiniteError(f"{when}: not finite: {names}; {where}; {UNCHANGED}.")

    def _raise_first(self, named: dict[str, Tensor], when: str) -> None:
        """Raise for the first tensor `[B,T,...]` that is not finite at a valid step."""
        valid = self.rows.steps["valid"]
        for name, tensor in named.items():
            bad = ~tensor.reshape(*valid.shape, -1).isfinite().all(-1) & valid
            if bool(bad.any()):
                row, step = bad.nonzero()[0].tolist()
                agents = sorted({self.segments.agent_of(int(number)) for number in self.index[bad.any(1)]})
                raise NonFiniteError(
                    f"{when}: {name} is not finite: {agent_list(agents)}, first "
                    f"{self.segments.describe(int(self.index[row]), step)}; {UNCHANGED}."
                )

    def _non_finite_terms(self, batches: Sequence[Tensor]) -> list[str]:
        """Name the non-finite terms and gradients of the first batch that has any."""
        for batch in batches:
            metrics, grads = self._backward(batch)
            terms = {name: term for name, term in metrics.items() if name.startswith("losses/")}
            names = non_finite_in(terms) + [f"the gradient of {name}" for name in non_finite_in(grads)]
            if names:
                return names
        return []

    def _agents(self) -> list[int]:
        """List the agents whose rows alone give a non-finite gradient."""
        rows = torch.arange(len(self.rows), device=self.index.device).split(1)
        bad = [row for row in rows if non_finite_in(self._backward(row)[1])]
        return sorted({self.segments.agent_of(int(self.index[row])) for row in bad})

    def _backward(self, index: Int[Tensor, " rows"]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the metrics and the gradients of some rows."""
        rows = self.rows.rows(index)
        teacher_outputs = [teacher.rows(index) for teacher in self.teacher_outputs]
        loss, metrics = self.loss_function(replay(self.policy, rows), rows, self.targets.rows(index), teacher_outputs)
        loss.backward()
        grads = {name: w.grad for name, w in self.policy.named_parameters() if w.grad is not None}
        self.policy.zero_grad(set_to_none=True)
        return metrics, grads
