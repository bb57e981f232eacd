"""The gradient step of a minibatch as a CUDA graph."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast
from weakref import proxy

import torch

from holdfast import cuda_graphs
from holdfast.config.trainer import TrainerConfig
from holdfast.cuda_graphs import CannotRecordError, Replay
from holdfast.learn.advantage import Targets
from holdfast.learn.minibatch_report import MinibatchReport
from holdfast.object_state import clone_leaves, copy_leaves, module_settings, tree_leaves
from holdfast.rollout import Segments
from holdfast.rollout.segments import POLICY_INPUTS
from holdfast.types import Float, Int, Tensor

if TYPE_CHECKING:
    from holdfast.learn.ppo import Learner

COEFFICIENTS = ("clip_coef", "vf_clip_coef", "vf_coef", "ent_coef")
"""Numbers of the loss that may change between updates: the graph reads them from tensors."""
OUTSIDE = ("target_kl", "gamma", "gae_lambda", "rho_clip", "c_clip")
"""Numbers that the recorded step does not read, but for V-trace."""
READ = (*POLICY_INPUTS, "actions", "act_log_prob", "values")
"""What the step reads of a rollout, but for V-trace."""
MAX_RECORDINGS = 8
"""With more kinds of rollouts or configs than this, no step is recorded any more."""


@dataclass
class GradientRecording:
    """A recorded step, for rollouts of one shape and one set of numbers, and where it reads them."""

    segments: Segments
    targets: Targets
    config: TrainerConfig
    """The coefficients are tensors."""
    is_warm: bool = False
    """Whether a minibatch has run as it is."""
    replay: Replay | None = None
    index: Int[Tensor, " rows"] | None = None
    weights: Float[Tensor, " rows"] | None = None
    report: MinibatchReport | None = None


class RecordedMinibatch:
    """Replays a learner's gradient step on rollouts that are copied to where the first one was.

    The first minibatch of each kind runs as it is. Numbers that are not finite are found at the end of the update; then
    the update is undone, and runs again without replays.
    """

    def __init__(self, learner: "Learner", log: Callable[[str], None]) -> None:
        self._learner, self._log = cast("Learner", proxy(learner)), log
        self._device = learner.initial_weights[0].device
        self._is_off = False
        self._recordings: dict[str, GradientRecording] = {}
        """By what they depend on: trimmed observations come in a few lengths."""
        self._current: GradientRecording | None = None
        self._coefficients = {name: torch.zeros((), device=self._device) for name in COEFFICIENTS}
        self._finite = torch.ones((), dtype=torch.bool, device=self._device)
        self._backup: list[tuple[Tensor, Tensor]] = []

    def load(
        self, segments: Segments, targets: Targets, config: TrainerConfig, *, has_teachers: bool
    ) -> tuple[Segments, Targets]:
        """Start an update: return the rollout where the graph reads it, and its targets."""
        if has_teachers and not self._is_off:
            self._turn_off("teachers' coefficients change in every update")
        shapes = [(leaf.shape, leaf.dtype) for leaf in tree_leaves(segments)]
        key = repr((shapes, module_settings(self._learner.policy))) + _fixed_numbers(config)
        if not self._is_off and key not in self._recordings and len(self._recordings) == MAX_RECORDINGS:
            self._turn_off(f"numbers or shapes that it needs have changed {MAX_RECORDINGS} times")
        if self._is_off:
            return segments, targets
        if key not in self._recordings:
            # Frozen fields are validated when a config is made, not when it is copied.
            with_tensors = config.model_copy(update={"ppo": config.ppo.model_copy(update=self._coefficients)})
            self._recordings[key] = GradientRecording(segments, clone_leaves(targets), with_tensors)
        current = self._current = self._recordings[key]
        copy_leaves(current.segments, segments)
        copy_leaves(current.targets, targets)
        for name, number in self._coefficients.items():
            number.fill_(getattr(config.ppo, name))
        self._finite.fill_(True)
        self._save()
        return current.segments, current.targets

    def step(
        self, minibatch: tuple[Int[Tensor, " rows"], Float[Tensor, " rows"] | None], targets: Targets
    ) -> MinibatchReport | None:
        """Replay the step on a minibatch; None: it must run as it is."""
        (index, weights), current = minibatch, self._current
        if current is None:
            return None
        if not current.is_warm:
            current.is_warm = True
            return None
        if current.replay is None:
            try:
                current.replay = self._record(current, index, weights)
            except CannotRecordError as error:
                self._turn_off(str(error))
                return None
        copy_leaves(current.targets, targets)
        assert current.index is not None, "made with the recording"
        current.index.copy_(index)
        if current.weights is not None and weights is not None:
            current.weights.copy_(weights)
        current.replay()
        assert current.report is not None, "made with the recording"
        return MinibatchReport(current.report.names, current.report.numbers.clone())

    def is_finite(self) -> bool:
        """Return whether all losses and gradients of the update were finite."""
        return self._is_off or bool(self._finite)

    @torch.no_grad()
    def undo(self, segments: Segments) -> None:
        """Restore weights, optimizers, values and ratios as they were before the update."""
        for saved, tensor in self._backup:
            tensor.copy_(saved)
        segments.steps["values_now"].copy_(segments.steps["values"])
        segments.steps["ratio"].fill_(1.0)

    def _record(self, current: GradientRecording, index: Tensor, weights: Tensor | None) -> Replay:
        segments, targets, config = current.segments, current.targets, current.config
        learner, rows_of = self._learner, index.clone()
        current.index, current.weights = rows_of, None if weights is None else weights.clone()
        # Latest values and ratios are stored only if something reads them.
        read, is_read = segments, config.refresh == "epoch" or config.ppo.advantage == "vtrace"
        if config.ppo.advantage != "vtrace":
            read = replace(segments, steps=segments.steps.select(*READ), tail=segments.tail.select())

        def step() -> None:
            gradients = learner.compute_gradients(read.rows(rows_of), current.weights, targets.rows(rows_of), config)
            self._finite.logical_and_(torch.isfinite(gradients.norm + gradients.loss))
            current.report = learner.take_step(gradients, segments, rows_of if is_read else None, config)

        # Their memory is the graph's: a gradient of an earlier minibatch would be added to.
        self._clear_gradients()
        try:
            replay = cuda_graphs.record(step, self._device)
        finally:
            self._clear_gradients()
        if len(self._recordings) == 1:
            self._log("minibatches are replayed as a CUDA graph")
        return replay

    def _clear_gradients(self) -> None:
        for optimizer in self._learner.optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _save(self) -> None:
        """Copy weights and optimizer states, to undo the update."""
        tensors = list(self._changed())
        if [(tensor.data_ptr(), tensor.shape) for _, tensor in self._backup] != [
            (tensor.data_ptr(), tensor.shape) for tensor in tensors
        ]:
            self._backup = [(tensor.clone(), tensor) for tensor in tensors]
            return
        saved, current = zip(*self._backup, strict=True)
        torch._foreach_copy_(list(saved), list(current))  # pyright: ignore[reportPrivateImportUsage]

    def _changed(self) -> Iterator[Tensor]:
        yield from self._learner.policy.parameters()
        for optimizer in self._learner.optimizers.values():
            for state in optimizer.state.values():
                yield from (number for number in state.values() if isinstance(number, Tensor))

    def _turn_off(self, reason: str) -> None:
        self._is_off, self._current, self._backup = True, None, []
        self._recordings.clear()
        self._log(f"minibatches run one operation at a time, not as CUDA graphs: {reason}.")


def _fixed_numbers(config: TrainerConfig) -> str:
    """Return all of a config that a recorded step does not read from tensors."""
    outside = () if config.ppo.advantage == "vtrace" else OUTSIDE
    ppo = config.ppo.model_dump(exclude={*COEFFICIENTS, *outside})
    optimizer = config.optimizer.model_dump(exclude=set() if config.optimizer.name == "muon" else {"learning_rate"})
    numbers = {
        name: getattr(config, name)
        for name in ("accumulate", "stale", "refresh", "burn_in", "clip_range", "minibatch_size")
    }
    return repr((ppo, optimizer, numbers, config.sampling.method))
