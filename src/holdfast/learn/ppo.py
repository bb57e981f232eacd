"""Learner: PPO epochs, minibatches, gradient steps."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from holdfast import ranks
from holdfast.config.trainer import PPOConfig, TrainerConfig
from holdfast.learn import losses, optimizers
from holdfast.learn.advantage import Targets, gae, refresh_bootstrap, vtrace
from holdfast.learn.nan_report import LossFunction, NonFiniteReport
from holdfast.learn.replay import burn_in_live, burn_in_rows, measure_staleness, recompute, replay
from holdfast.learn.rewards import RewardNormalizer
from holdfast.learn.teachers import TeacherOutput
from holdfast.policies import LSTMWrapper
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.rollout import Collector, Segments
from holdfast.rollout.segments import (
    annealed_beta,
    importance_weights,
    minibatches,
    own_part,
    sample_minibatches,
    segment_priorities,
    shift_left,
)
from holdfast.state_tree import get_field, get_tensor_like
from holdfast.types import Float, Int, Tensor

Minibatch = tuple[Int[Tensor, " rows"], Float[Tensor, " rows"] | None]
MAX_METRICS = ("ratio_error", "value_error")
"""Metrics whose maximum counts; of all others it is the mean."""


@torch.no_grad()
def compute_targets(segments: Segments, ppo: PPOConfig, values: Literal["values", "values_now"] = "values") -> Targets:
    """Compute advantages and returns from stored rewards, flags, values and (for V-trace) ratios.

    The values are those of the rollout, or the latest of the update.
    """
    steps, tail = segments.steps, segments.tail
    inputs = {
        "values": steps[values],
        "valid": steps["valid"],
        "next_rewards": shift_left(steps["rewards"], tail["rewards"]),
        "next_terminated": shift_left(steps["dones"], tail["dones"]),
        "next_truncated": shift_left(steps["truncateds"], tail["truncateds"]),
        "next_last_values": shift_left(steps["last_values"], tail["last_values"]),
        "end_values": tail["values"],
        "gamma": ppo.gamma,
        "lam": ppo.gae_lambda,
    }
    if ppo.advantage == "gae":
        advantages = gae(**inputs)
    else:
        advantages = vtrace(**inputs, ratio=steps["ratio"], rho_clip=ppo.rho_clip, c_clip=ppo.c_clip)
    return Targets(advantages, advantages + steps[values])


def normalize_advantages(
    targets: Targets, segments: Segments, ppo: PPOConfig, weights: Float[Tensor, " B"] | None
) -> Targets:
    """Normalize the advantages of a minibatch (`ppo.norm_adv`), and apply importance-sampling weights."""
    advantages = targets.advantages
    if ppo.norm_adv:
        advantages = losses.masked_normalize(advantages, segments.steps["valid"])
    if weights is not None:
        advantages = advantages * weights[:, None]
    return Targets(advantages, targets.returns)


def compute_loss(
    policy: LSTMWrapper,
    outputs: PolicyBatch,
    segments: Segments,
    targets: Targets,
    teacher_outputs: Sequence[TeacherOutput] = (),
    *,
    ppo: PPOConfig,
    initial_weights: Sequence[Tensor] = (),
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Total loss of replayed segments as the config weighs its terms, and its terms and diagnostics."""
    valid, extra = segments.steps["valid"], {}
    if ppo.l2_reg:
        extra["losses/l2_reg"] = (ppo.l2_reg, losses.l2_distance(policy.parameters()))
    if ppo.l2_init:
        extra["losses/l2_init"] = (ppo.l2_init, losses.l2_distance(policy.parameters(), initial_weights))
    for teacher in teacher_outputs:
        params = outputs[policy.actions.key]
        action = losses.teacher_action_loss(policy.actions, teacher.params, params, valid)
        scale = policy.value_scale
        value = losses.teacher_value_loss(teacher.values / scale, outputs["values"] / scale, valid)
        extra[f"losses/teacher_action@{teacher.name}"] = (teacher.action, action)
        extra[f"losses/teacher_value@{teacher.name}"] = (teacher.value, value)
    return losses.ppo_loss(
        outputs,
        segments.steps,
        targets,
        clip_coef=ppo.clip_coef,
        vf_clip_coef=ppo.vf_clip_coef if ppo.clip_vloss else None,
        vf_coef=ppo.vf_coef,
        ent_coef=ppo.ent_coef,
        extra=extra,
        value_scale=policy.value_scale,
    )


def weighted_mean(reports: Sequence[Mapping[str, Tensor]], shares: Sequence[Tensor]) -> dict[str, Tensor]:
    """Combine the metrics of micro-batches, weighted by their shares of the valid steps of all ranks."""
    if len(reports) == 1 and ranks.count() == 1:
        return dict(reports[0])
    weight = torch.stack(list(shares))
    metrics = {}
    for name in reports[0]:
        numbers = torch.stack([report[name] for report in reports])
        metrics[name] = numbers.max() if name in MAX_METRICS else (numbers * weight.to(numbers.dtype)).sum()
    return metrics


def sum_over_ranks(reports: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Add up the ranks' shares of the metrics of each minibatch, and take the largest of `MAX_METRICS`."""
    if ranks.count() == 1 or not reports:
        return [dict(report) for report in reports]
    names = [name for name in reports[0] if name not in MAX_METRICS]
    numbers = ranks.reduce(torch.stack([torch.stack([report[name].double() for name in names]) for report in reports]))
    highest = [torch.stack([report[name].double() for name in MAX_METRICS]) for report in reports]
    highest = ranks.reduce(torch.stack(highest), "max")
    rows = torch.cat([numbers, highest], dim=1)
    return [dict(zip([*names, *MAX_METRICS], row, strict=True)) for row in rows]


def mean_metrics(reports: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Return means over minibatches, and the replay errors of the first; the host waits for the device here."""
    if not reports:
        return {"charts/gradient_steps": 0.0}
    means = {name: _mean(reports, name) for name in reports[0] if name not in MAX_METRICS}
    return means | {
        "charts/gradient_steps": len(reports),
        "memory/replay_error": float(reports[0]["ratio_error"]),
        "memory/replay_value_error": float(reports[0]["value_error"]),
    }


def _mean(reports: Sequence[Mapping[str, Tensor]], name: str) -> float:
    return float(torch.stack([report[name] for report in reports]).mean())


@runtime_checkable
class UpdateHooks(Protocol):
    """Hooks into the first minibatch of an update."""

    def around_forward(self) -> AbstractContextManager[None]:
        """Context of the first micro-batch's forward pass and loss."""
        ...

    def on_gradients(self, policy: LSTMWrapper) -> None:
        """Called with the gradients before clipping."""


class Learner:
    """Updates a policy's weights by PPO on segments."""

    def __init__(
        self, policy: LSTMWrapper, config: TrainerConfig, seed: int, *, clip_reward: float | None = None
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

    def update(
        self,
        segments: Segments,
        config: TrainerConfig | None = None,
        *,
        progress: float = 0.0,
        teacher_outputs: Sequence[TeacherOutput] = (),
        hooks: UpdateHooks | None = None,
    ) -> dict[str, float]:
        """Run the epochs of one update and return its metrics; `config` has the scheduled values.

        While the policy's statistics are empty, the rollout only fills them: one update on numbers of any size would
        saturate the memory for good.
        """
        config = config or self.config
        optimizers.set_options(self.optimizers, config.optimizer)
        segments = self._shape_rewards(segments, config.ppo.gamma)
        targets = initial_targets = compute_targets(segments, config.ppo)
        reports, iteration, epochs = list[dict[str, Tensor]](), int(segments.version[0]), 0
        for epoch in range(0 if self.policy.needs_statistics else config.update_epochs):
            if epoch:
                targets = self._refresh_targets(segments, targets, config)
            indices = self._minibatch_indices(segments, targets, config, epoch, progress)
            epoch_reports = []
            for number, minibatch in enumerate(indices):
                location = f"iteration {iteration + 1}, epoch {epoch + 1}, minibatch {number + 1}"
                monitor = hooks if epoch == number == 0 else None
                part = own_part(*minibatch, len(segments))
                inputs = (segments, part, targets, config, teacher_outputs, monitor, location)
                epoch_reports.append(self._minibatch_step(*inputs))
            epoch_reports = sum_over_ranks(epoch_reports)
            reports += epoch_reports
            epochs += 1
            if config.ppo.target_kl is not None and _mean(epoch_reports, "losses/approx_kl") > config.ppo.target_kl:
                break
        steps = segments.steps
        explained = losses.explained_variance(steps["values"], initial_targets.returns, steps["valid"])
        # After the last minibatch: until then replays need the statistics of the rollout.
        self.policy.update_statistics(steps["env_obs"], initial_targets.returns, steps["valid"])
        beta = {"charts/beta": annealed_beta(config.sampling.beta0, progress)}
        return {
            **mean_metrics(reports),
            "losses/explained_variance": float(explained),
            "charts/epochs": epochs,
            **(beta if config.sampling.method == "prioritized" else {}),
        }

    def _shape_rewards(self, segments: Segments, gamma: float) -> Segments:
        """Clip and normalize the rewards of a rollout, as the config says."""
        clip = self.clip_reward
        if clip is not None:
            segments = segments.map_rewards(lambda reward: reward.clamp(-clip, clip))
        return segments if self.reward_normalizer is None else self.reward_normalizer.normalize(segments, gamma)

    def refresh(
        self, segments: Segments, collector: Collector, config: TrainerConfig | None = None
    ) -> dict[str, float]:
        """Measure the staleness of states, and refresh the live ones as `trainer.stale` says."""
        config = config or self.config
        metrics = measure_staleness(self.policy, segments, collector.next_step)
        if config.stale == "recompute":
            _, after = recompute(self.policy, segments, batch_size=_segments_per_minibatch(config))
            self.policy.store.write(0, after)
        elif config.stale == "burn_in":
            assert collector.next_burn_in is not None, "a collector with burn-in has collected a rollout"
            burn_in_live(self.policy, collector.next_burn_in, batch_size=_segments_per_minibatch(config))
        return metrics

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
        number = int(segments.version[0]) * config.update_epochs + epoch
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
    ) -> dict[str, Tensor]:
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
        if not bool(torch.isfinite(norm + loss)):
            batch = (rows, targets, teacher_outputs)
            report = NonFiniteReport(self.policy, segments, index, *batch, self._loss_function(ppo))
            report.raise_of_all_ranks(location, batch_size=-(-len(rows) // config.accumulate))
        for optimizer in self.optimizers.values():
            optimizer.step()
        optimizers.clip_weights(self.policy, self.weight_bounds, config.clip_range)
        # In the buffer itself, not in the minibatch, which is a copy.
        if has_rows:
            segments.steps["values_now"][index] = values
            segments.steps["ratio"][index] = log_ratio.exp()
        return metrics | {"losses/grad_norm": norm / ranks.count()}

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
