"""Learner: PPO epochs, minibatches, gradient steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from tensordict import TensorDict
from torch import nn

from holdfast import ranks
from holdfast.config.trainer import PPOConfig, TrainerConfig
from holdfast.cuda_graphs import can_record
from holdfast.learn import losses, optimizers
from holdfast.learn.advantage import Targets, refresh_bootstrap
from holdfast.learn.minibatch_report import MinibatchReport, mean_metrics, mean_of, sum_over_ranks, weighted_mean
from holdfast.learn.nan_report import LossFunction, NonFiniteReport
from holdfast.learn.objective import compute_loss, compute_targets, normalize_advantages
from holdfast.learn.recorded import RecordedMinibatch
from holdfast.learn.replay import (
    burn_in_live,
    burn_in_rows,
    recompute,
    replay,
    staleness_metrics,
    staleness_sample,
    staleness_sums,
)
from holdfast.learn.rewards import RewardNormalizer
from holdfast.learn.teachers import TeacherOutput
from holdfast.object_state import copy_leaves
from holdfast.policies import LSTMWrapper
from holdfast.recorded_call import RecordedCall
from holdfast.rollout import Collector, Segments
from holdfast.rollout.segments import (
    annealed_beta,
    importance_weights,
    minibatches,
    own_part,
    sample_minibatches,
    segment_priorities,
)
from holdfast.state_tree import get_field, get_tensor_like
from holdfast.types import Float, Int, Tensor
from holdfast.worlds import Step

Minibatch = tuple[Int[Tensor, " rows"], Float[Tensor, " rows"] | None]


@runtime_checkable
class UpdateHooks(Protocol):
    """Hooks into the first minibatch of an update."""

    def around_forward(self) -> AbstractContextManager[None]:
        """Context of the first micro-batch's forward pass and loss."""
        ...

    def on_gradients(self, policy: LSTMWrapper) -> None:
        """Called with the gradients before clipping."""


class Gradients(NamedTuple):
    """What the forward and backward pass of a minibatch leave beside the gradients of the weights."""

    rows: Segments
    targets: Targets
    loss: Float[Tensor, ""]
    norm: Float[Tensor, ""]
    metrics: dict[str, Tensor]
    values: Float[Tensor, "B T"]
    log_ratio: Float[Tensor, "B T"]


class Learner:
    """Updates a policy's weights by PPO on segments.

    With `graphs`, minibatches on a GPU are replayed as a CUDA graph; it is called with the reason if they cannot be.
    """

    def __init__(
        self,
        policy: LSTMWrapper,
        config: TrainerConfig,
        seed: int,
        *,
        clip_reward: float | None = None,
        graphs: Callable[[str], None] | None = None,
    ) -> None:
        self.policy, self.config, self.seed = policy, config, seed
        self.optimizers = optimizers.make_optimizers(policy, config.optimizer)
        # Listed once: to find them, torch walks through all modules.
        self._weights = list(policy.parameters())
        with torch.no_grad():
            self.initial_weights = [weight.clone() for weight in self._weights]
        self.weight_bounds = optimizers.initial_bounds(policy)
        """Largest initial entry of each weight matrix, for weight clipping."""
        self.clip_reward = clip_reward
        self.reward_normalizer = RewardNormalizer() if config.normalize_reward else None
        self._needs_statistics, self._iteration = True, 0
        self._sample: Int[Tensor, " N"] | None = None
        self._recorded: RecordedMinibatch | None = None
        is_on = graphs is not None and can_record(self._weights[0].device) and ranks.count() == 1
        self._prepare = RecordedCall[tuple[Segments, Targets]](is_on=is_on)
        self._finish = RecordedCall[Tensor](is_on=is_on)
        self._staleness = RecordedCall[Tensor](is_on=is_on)
        if is_on and graphs is not None:
            self._recorded = RecordedMinibatch(self, graphs)

    def update(
        self,
        segments: Segments,
        config: TrainerConfig | None = None,
        *,
        progress: float = 0.0,
        teacher_outputs: Sequence[TeacherOutput] = (),
        hooks: UpdateHooks | None = None,
        iteration: int | None = None,
    ) -> dict[str, float]:
        """Run the epochs of one update and return its metrics; `config` has the scheduled values.

        While the policy's statistics are empty, the rollout only fills them: one update on numbers of any size would
        saturate the memory for good.
        """
        config = config or self.config
        # To read it from the segments, the host would wait for the device.
        self._iteration = int(segments.version[0]) if iteration is None else iteration
        optimizers.set_options(self.optimizers, config.optimizer)
        ppo = config.ppo
        numbers = (ppo.gamma, ppo.gae_lambda, ppo.advantage, ppo.rho_clip, ppo.c_clip)
        segments, targets = self._prepare(self._shape_and_target, segments, ppo, key=numbers)
        initial_targets = targets
        recorded, entry_state = self._recorded, segments.entry_state
        self._needs_statistics = self._needs_statistics and self.policy.needs_statistics
        if recorded is not None:
            segments, targets = recorded.load(segments, targets, config, has_teachers=bool(teacher_outputs))
        inputs = (segments, targets, config, progress, teacher_outputs, hooks)
        reports, epochs = self._run_epochs(*inputs)
        if recorded is not None and not recorded.is_finite():
            # Again, minibatch by minibatch: the one whose numbers are not finite raises.
            recorded.undo(segments)
            inputs = (segments, initial_targets, config, progress, teacher_outputs, hooks)
            reports, epochs = self._run_epochs(*inputs, replays=False)
        if segments.entry_state is not entry_state:
            # Recomputed states count as the rollout's.
            copy_leaves(entry_state, segments.entry_state)
        explained = self._finish(self._explain_and_count, segments, initial_targets)
        beta = {"charts/beta": annealed_beta(config.sampling.beta0, progress)}
        return {
            **mean_metrics(reports),
            "losses/explained_variance": float(explained),
            "charts/epochs": epochs,
            **(beta if config.sampling.method == "prioritized" else {}),
        }

    def _run_epochs(
        self,
        segments: Segments,
        targets: Targets,
        config: TrainerConfig,
        progress: float,
        teacher_outputs: Sequence[TeacherOutput],
        hooks: UpdateHooks | None,
        *,
        replays: bool = True,
    ) -> tuple[list[MinibatchReport], int]:
        """Take the gradient steps of an update; return their metrics and the number of epochs."""
        reports, iteration, epochs = list[MinibatchReport](), self._iteration, 0
        recorded = self._recorded if replays else None
        for epoch in range(0 if self._needs_statistics else config.update_epochs):
            if epoch:
                targets = self._refresh_targets(segments, targets, config)
            epoch_reports = []
            for number, minibatch in enumerate(self._minibatch_indices(segments, targets, config, epoch, progress)):
                monitor = hooks if epoch == number == 0 else None
                report = None if recorded is None or monitor is not None else recorded.step(minibatch, targets)
                if report is None:
                    location = f"iteration {iteration + 1}, epoch {epoch + 1}, minibatch {number + 1}"
                    part = own_part(*minibatch, len(segments))
                    inputs = (segments, part, targets, config, teacher_outputs, monitor, location)
                    report = self._minibatch_step(*inputs)
                epoch_reports.append(report)
            epoch_reports = sum_over_ranks(epoch_reports)
            reports += epoch_reports
            epochs += 1
            if config.ppo.target_kl is not None and mean_of(epoch_reports, "losses/approx_kl") > config.ppo.target_kl:
                break
        return reports, epochs

    def _shape_and_target(self, segments: Segments, ppo: PPOConfig) -> tuple[Segments, Targets]:
        """Clip and normalize the rewards of a rollout, as the config says, and compute the targets."""
        clip = self.clip_reward
        if clip is not None:
            segments = segments.map_rewards(lambda reward: reward.clamp(-clip, clip))
        if self.reward_normalizer is not None:
            segments = self.reward_normalizer.normalize(segments, ppo.gamma)
        return segments, compute_targets(segments, ppo)

    @torch.no_grad()
    def _explain_and_count(self, segments: Segments, targets: Targets) -> Float[Tensor, ""]:
        """Return the explained variance, and add the rollout to the policy's statistics.

        After the last minibatch: until then replays need the statistics of the rollout.
        """
        steps = segments.steps
        explained = losses.explained_variance(steps["values"], targets.returns, steps["valid"])
        self.policy.update_statistics(steps["env_obs"], targets.returns, steps["valid"])
        return explained

    def refresh(
        self, segments: Segments, collector: Collector, config: TrainerConfig | None = None
    ) -> dict[str, float]:
        """Measure the staleness of states, and refresh the live ones as `trainer.stale` says."""
        config = config or self.config
        metrics = {}
        if self.policy.has_memory():
            states = self.policy.store.view(0)
            inputs = (segments, collector.next_step, states, tuple(self._weights))
            metrics = staleness_metrics(self._staleness(self._sum_staleness, *inputs))
        if config.stale == "recompute":
            _, after = recompute(self.policy, segments, batch_size=_segments_per_minibatch(config))
            self.policy.store.write(0, after)
        elif config.stale == "burn_in":
            assert collector.next_burn_in is not None, "a collector with burn-in has collected a rollout"
            burn_in_live(self.policy, collector.next_burn_in, batch_size=_segments_per_minibatch(config))
        return metrics

    def _sum_staleness(
        self, segments: Segments, next_step: Step, states: TensorDict, weights: tuple[Tensor, ...]
    ) -> Float[Tensor, " 4"]:
        if self._sample is None:
            self._sample = staleness_sample(segments.agent_shape[0]).to(segments.version.device)
        return staleness_sums(self.policy, segments, next_step, self._sample)

    def state(self) -> dict[str, Any]:
        """Return the optimizer state, the initial weights and the weight bounds."""
        return {
            "moments": {name: optimizer.state_dict()["state"] for name, optimizer in self.optimizers.items()},
            "initial_weights": dict(enumerate(self.initial_weights)),
            "weight_bounds": self.weight_bounds,
            **({} if self.reward_normalizer is None else {"reward": self.reward_normalizer.state()}),
        }

    def restore(self, saved: Any) -> None:
        """Restore what `state` returned."""
        tensors, bounds = (get_field(saved, key, dict) for key in ("initial_weights", "weight_bounds"))
        weights = [get_tensor_like(tensors, number, w) for number, w in enumerate(self.initial_weights)]
        weight_bounds = {name: get_field(bounds, name, float) for name in self.weight_bounds}
        if self.reward_normalizer is not None:
            self.reward_normalizer.restore(get_field(saved, "reward", dict))
        optimizers.restore_optimizers(self.optimizers, get_field(saved, "moments", dict))
        self.initial_weights, self.weight_bounds = weights, weight_bounds

    def _minibatch_indices(
        self, segments: Segments, targets: Targets, config: TrainerConfig, epoch: int, progress: float
    ) -> Iterator[Minibatch]:
        """Yield the row indices and importance-sampling weights (none: 1) of each minibatch of an epoch.

        Rows are counted over all ranks: each rank computes those that it has collected.
        """
        sampling, rows, total = config.sampling, _segments_per_minibatch(config), len(segments) * ranks.count()
        number = self._iteration * config.update_epochs + epoch
        if sampling.method == "sequential":
            for index in minibatches(segments, rows, seed=self.seed, epoch=number):
                yield index, None
            return
        priorities = None
        if sampling.method == "prioritized":
            own = segment_priorities(targets.advantages, segments.steps["valid"], sampling.alpha)
            priorities = ranks.concat(own)
        beta = annealed_beta(sampling.beta0, progress)
        draws = sample_minibatches(segments, priorities, rows, total // rows, seed=self.seed, epoch=number)
        for index, probability in draws:
            yield index, None if priorities is None else importance_weights(probability, total, beta)

    def _refresh_targets(self, segments: Segments, targets: Targets, config: TrainerConfig) -> Targets:
        """Recompute entry states and targets before an epoch, as the config says."""
        if config.stale == "recompute":
            entry_state, _ = recompute(self.policy, segments, batch_size=_segments_per_minibatch(config))
            segments.entry_state.update_(entry_state.flatten(0, 1))
        if config.refresh == "epoch":
            refresh_bootstrap(segments)
            return compute_targets(segments, config.ppo, "values_now")
        return targets

    def _minibatch_step(
        self,
        segments: Segments,
        minibatch: Minibatch,
        targets: Targets,
        config: TrainerConfig,
        teacher_outputs: Sequence[TeacherOutput],
        monitor: UpdateHooks | None,
        location: str,
    ) -> MinibatchReport:
        """Take one gradient step; raise before a non-finite gradient reaches the weights."""
        (index, weights), ppo = minibatch, config.ppo
        has_rows = len(index) > 0
        if not has_rows:
            # All rows are of other ranks: one without weight takes their place here.
            index, weights = index.new_zeros(1), None
        rows, targets = segments.rows(index), targets.rows(index)
        if not has_rows:
            rows.steps["valid"] = torch.zeros_like(rows.steps["valid"])
        teacher_outputs = [teacher.rows(index) for teacher in teacher_outputs]
        gradients = self.compute_gradients(rows, weights, targets, config, teacher_outputs, monitor)
        if not bool(torch.isfinite(gradients.norm + gradients.loss)):
            batch = (gradients.rows, gradients.targets, teacher_outputs)
            report = NonFiniteReport(self.policy, segments, index, *batch, self._loss_function(ppo))
            report.raise_of_all_ranks(location, batch_size=-(-len(rows) // config.accumulate))
        return self.take_step(gradients, segments, index if has_rows else None, config)

    def compute_gradients(
        self,
        rows: Segments,
        weights: Float[Tensor, " B"] | None,
        targets: Targets,
        config: TrainerConfig,
        teacher_outputs: Sequence[TeacherOutput] = (),
        monitor: UpdateHooks | None = None,
    ) -> "Gradients":
        """Compute the gradients of a minibatch, clipped; the host does not wait for the device."""
        ppo = config.ppo
        if config.stale == "burn_in":
            rows = burn_in_rows(self.policy, rows)
        if ppo.advantage == "vtrace":
            targets = self._vtrace_targets(rows, config)
        targets = normalize_advantages(targets, rows, ppo, weights)
        for weight in self._weights:
            weight.grad = None
        loss, metrics, values, log_ratio = self._backward(rows, targets, config, teacher_outputs, monitor)
        (loss,) = ranks.average_gradients(self._weights, loss)
        if monitor is not None:
            monitor.on_gradients(self.policy)
        norm = nn.utils.clip_grad_norm_(self._weights, ppo.max_grad_norm)
        return Gradients(rows, targets, loss, norm, metrics, values, log_ratio)

    def take_step(
        self, gradients: "Gradients", segments: Segments, index: Int[Tensor, " rows"] | None, config: TrainerConfig
    ) -> MinibatchReport:
        """Change the weights, and store the latest values and ratios of these rows of the rollout."""
        for optimizer in self.optimizers.values():
            optimizer.step()
        optimizers.clip_weights(self.policy, self.weight_bounds, config.clip_range)
        # In the buffer itself, not in the minibatch, which is a copy.
        if index is not None:
            segments.steps["values_now"][index] = gradients.values
            segments.steps["ratio"][index] = gradients.log_ratio.exp()
        metrics = gradients.metrics | {"losses/grad_norm": gradients.norm / ranks.count()}
        return MinibatchReport(tuple(metrics), torch.stack(tuple(metrics.values())))

    def _loss_function(self, ppo: PPOConfig) -> LossFunction:
        return partial(compute_loss, self.policy, ppo=ppo, initial_weights=self.initial_weights)

    @torch.no_grad()
    def _vtrace_targets(self, rows: Segments, config: TrainerConfig) -> Targets:
        """Compute V-trace targets with the current probabilities of the actions."""
        outputs = [replay(self.policy, rows.rows(part)) for part in _split(rows, config.accumulate)]
        log_prob = torch.cat([output["act_log_prob"] for output in outputs])
        rows.steps["ratio"] = (log_prob - rows.steps["act_log_prob"]).exp()
        return compute_targets(rows, config.ppo, "values_now" if config.refresh == "epoch" else "values")

    def _backward(
        self,
        rows: Segments,
        targets: Targets,
        config: TrainerConfig,
        teacher_outputs: Sequence[TeacherOutput],
        monitor: UpdateHooks | None,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor]:
        """Accumulate gradients over micro-batches; return loss, metrics, values and log-ratios."""
        (num_valid,) = ranks.sums(rows.steps["valid"].sum())
        num_valid = num_valid.clamp(min=1)
        total, reports, shares = torch.zeros_like(num_valid, dtype=targets.returns.dtype), [], []
        values, log_ratios, loss_function = [], [], self._loss_function(config.ppo)
        for index in _split(rows, config.accumulate):
            batch = (rows, targets, teacher_outputs)
            if config.accumulate > 1:
                batch = (rows.rows(index), targets.rows(index), [t.rows(index) for t in teacher_outputs])
            with nullcontext() if monitor is None or reports else monitor.around_forward():
                outputs = replay(self.policy, batch[0])
                loss, report = loss_function(outputs, *batch)
            share = batch[0].steps["valid"].sum().to(loss.dtype) / num_valid
            (loss * share).backward()
            with torch.no_grad():
                total = total + loss * share
                values.append(outputs["values"].clone())
                log_ratios.append(outputs["act_log_prob"] - batch[0].steps["act_log_prob"])
            reports.append(report)
            shares.append(share)
        return total, weighted_mean(reports, shares), torch.cat(values), torch.cat(log_ratios)


def _segments_per_minibatch(config: TrainerConfig) -> int:
    return config.minibatch_size // config.bptt_horizon


def _split(rows: Segments, count: int) -> tuple[Int[Tensor, " rows"], ...]:
    """Split row indices into `count` micro-batches."""
    return torch.arange(len(rows), device=rows.version.device).split(-(-len(rows) // count))
