"""The update: weights change, from minibatches of whole segments replayed from their entry states."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from holdfast.experience import (
    Collector,
    Segments,
    annealed_beta,
    drawn,
    importance_weights,
    minibatches,
    priorities_of,
)
from holdfast.learn import losses, stale
from holdfast.learn.faults import Fault
from holdfast.learn.objective import Judged, loss_of
from holdfast.learn.optimizers import make_optimizer, moments_of, restore_moments
from holdfast.learn.replay import replay
from holdfast.learn.reports import Reports, joined
from holdfast.learn.targets import Targets, normalised, renew_tails, targets_of
from holdfast.learn.teachers import Heard
from holdfast.learn.weights import clip_weights, initial_bounds
from holdfast.policies import LSTMWrapper
from holdfast.saved import taken, tensor_like
from holdfast.shapes import Float, Int, Tensor
from holdfast.trainer_knobs import Optimizer, Trainer


@runtime_checkable
class Onlooker(Protocol):
    """Somebody who looks on while the first minibatch is computed."""

    def saving(self) -> AbstractContextManager[None]:
        """Stand around the forward pass of its first piece."""
        ...

    def saw_gradients(self, policy: LSTMWrapper) -> None:
        """Look at gradients before they are clipped."""
        ...


class Minibatch(NamedTuple):
    """Which rows, and how much each weighs; none: all alike."""

    rows: Int[Tensor, " rows"]
    weights: Float[Tensor, " rows"] | None = None


@dataclass
class Learner:
    """Changes the weights of a policy by what it lived."""

    policy: LSTMWrapper
    knobs: Trainer
    seed: int
    optimizer: torch.optim.Optimizer = field(init=False)
    anchors: list[Tensor] = field(init=False)
    """The weights at the start."""
    bounds: dict[str, float] = field(init=False)
    """How large they were."""

    def __post_init__(self) -> None:
        knobs = self.knobs.optimizer
        self.optimizer = make_optimizer(
            self.policy,
            name=knobs.name,
            learning_rate=knobs.learning_rate,
            betas=(knobs.beta1, knobs.beta2),
            eps=knobs.eps,
            weight_decay=knobs.weight_decay,
            momentum=knobs.momentum,
        )
        with torch.no_grad():
            self.anchors = [weight.clone() for weight in self.policy.parameters()]
        self.bounds = initial_bounds(self.policy)

    def update(
        self,
        segments: Segments,
        knobs: Trainer | None = None,
        *,
        progress: float = 0.0,
        heard: Sequence[Heard] = (),
        onlooker: Onlooker | None = None,
    ) -> dict[str, float]:
        """Train on what was lived and return the metrics; `knobs` are those of this moment.

        `memory/replay_error` is the first minibatch's ratio before any weight changed: how far replaying
        is from what was lived.
        """
        knobs = knobs or self.knobs
        self._set_options(knobs.optimizer)
        targets = before = targets_of(segments, knobs.ppo)
        reports, iteration, epochs = Reports(), int(segments.version[0]), 0
        for epoch in range(knobs.update_epochs):
            if epoch:
                targets = self._renewed(segments, targets, knobs)
            for number, chosen in enumerate(self._order(segments, targets, knobs, epoch, progress)):
                when = f"iteration {iteration + 1}, epoch {epoch + 1}, minibatch {number + 1}"
                looked = onlooker if epoch == number == 0 else None
                reports.add(self._learn_from(segments, chosen, targets, knobs, heard, looked, when))
            epochs += 1
            if knobs.ppo.target_kl is not None and reports.end_epoch() > knobs.ppo.target_kl:
                break
        steps = segments.steps
        spread = losses.explained_variance(steps["values"], before.returns, steps["valid"])
        beta = {"charts/beta": annealed_beta(knobs.sampling.beta0, progress)}
        return {
            **reports.told(),
            "losses/explained_variance": float(spread),
            "charts/epochs": epochs,
            **(beta if knobs.sampling.method == "prioritized" else {}),
        }

    def refresh(
        self, segments: Segments, collector: Collector, knobs: Trainer | None = None
    ) -> dict[str, float]:
        """Measure how stale states have become, and bring the live ones up to date if asked to."""
        knobs = knobs or self.knobs
        found = stale.staleness(self.policy, segments, collector.pending)
        if knobs.stale == "recompute":
            after = stale.recompute(self.policy, segments, at_once=self._rows(knobs)).after
            self.policy.store.write(0, after)
        elif knobs.stale == "burn_in":
            stale.warm_live(self.policy, collector.coming_lead, at_once=self._rows(knobs))
        return found

    def state(self) -> dict[str, Any]:
        """Say what the optimizer remembers, and how the weights were at the start."""
        anchors = dict(enumerate(self.anchors))
        return {"moments": moments_of(self.optimizer), "anchors": anchors, "bounds": self.bounds}

    def restore(self, saved: Any) -> None:
        """Go on from there."""
        anchors = taken(saved, "anchors", dict)
        anchors = [tensor_like(anchors, number, weight) for number, weight in enumerate(self.anchors)]
        bounds = {name: taken(taken(saved, "bounds", dict), name, float) for name in self.bounds}
        restore_moments(self.optimizer, taken(saved, "moments", dict))
        self.anchors, self.bounds = anchors, bounds

    def _set_options(self, knobs: Optimizer) -> None:
        """Let the optimiser work with the numbers of this moment."""
        numbers = {
            "lr": knobs.learning_rate,
            "betas": (knobs.beta1, knobs.beta2),
            "eps": knobs.eps,
            "weight_decay": knobs.weight_decay,
            "momentum": knobs.momentum,
        }
        for group in self.optimizer.param_groups:
            # Each kind has some of them.
            group.update({name: number for name, number in numbers.items() if name in group})

    def _rows(self, knobs: Trainer) -> int:
        return knobs.minibatch_size // knobs.bptt_horizon

    def _order(
        self, segments: Segments, targets: Targets, knobs: Trainer, epoch: int, progress: float
    ) -> Iterator[Minibatch]:
        """Say which rows make each minibatch of an epoch."""
        sampling, rows = knobs.sampling, self._rows(knobs)
        number = int(segments.version[0]) * knobs.update_epochs + epoch
        if sampling.method == "sequential":
            yield from map(Minibatch, minibatches(segments, rows, seed=self.seed, epoch=number))
            return
        priorities, valid = None, segments.steps["valid"]
        if sampling.method == "prioritized":
            priorities = priorities_of(targets.advantages, valid, sampling.alpha)
        beta, total = annealed_beta(sampling.beta0, progress), len(segments)
        for index, probability in drawn(
            segments, priorities, rows, total // rows, seed=self.seed, epoch=number
        ):
            weights = None if priorities is None else importance_weights(probability, total, beta)
            yield Minibatch(index, weights)

    def _renewed(self, segments: Segments, targets: Targets, knobs: Trainer) -> Targets:
        """Bring up to date what an epoch begins with: entry states, and advantages."""
        if knobs.stale == "recompute":
            fresh = stale.recompute(self.policy, segments, at_once=self._rows(knobs))
            segments.entry.update_(fresh.entry.flatten(0, 1))
        if knobs.refresh == "epoch":
            renew_tails(segments)
            return targets_of(segments, knobs.ppo, "values_now")
        return targets

    def _learn_from(
        self,
        segments: Segments,
        chosen: Minibatch,
        targets: Targets,
        knobs: Trainer,
        heard: Sequence[Heard],
        onlooker: Onlooker | None,
        when: str,
    ) -> dict[str, Tensor]:
        """Take one gradient step; what is not finite stops the run before it spoils a weight."""
        index, ppo = chosen.rows, knobs.ppo
        rows, goal = segments.rows(index), targets.rows(index)
        if knobs.stale == "burn_in":
            rows = stale.warmed(self.policy, rows)
        if ppo.advantage == "vtrace":
            goal = self._weighed(rows, knobs)
        goal = normalised(goal, rows, ppo, chosen.weights)
        lessons = [each.rows(index) for each in heard]
        self.optimizer.zero_grad(set_to_none=True)
        loss, report, judged = self._accumulated(rows, goal, knobs, lessons, onlooker)
        if onlooker is not None:
            onlooker.saw_gradients(self.policy)
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), ppo.max_grad_norm)
        if not bool(torch.isfinite(norm + loss)):
            fault = Fault(self.policy, segments, index, rows, goal, ppo, self.anchors, lessons)
            fault.tell(when, at_once=len(rows) // knobs.accumulate)
        self.optimizer.step()
        clip_weights(self.policy, self.bounds, knobs.clip_range)
        # In the buffer itself, not in the copy that the minibatch is.
        segments.steps["values_now"][index] = judged.values
        segments.steps["ratio"][index] = judged.ratio
        return report | {"losses/grad_norm": norm}

    @torch.no_grad()
    def _weighed(self, rows: Segments, knobs: Trainer) -> Targets:
        """Compute V-trace targets by how likely the actions are by now."""
        parts = (replay(self.policy, rows.rows(piece)) for piece in _pieces(rows, knobs.accumulate))
        new = torch.cat([part["act_log_prob"] for part in parts])
        rows.steps["ratio"] = (new - rows.steps["act_log_prob"]).exp()
        return targets_of(rows, knobs.ppo, "values_now" if knobs.refresh == "epoch" else "values")

    def _accumulated(
        self,
        rows: Segments,
        goal: Targets,
        knobs: Trainer,
        lessons: Sequence[Heard],
        onlooker: Onlooker | None,
    ) -> tuple[Tensor, dict[str, Tensor], Judged]:
        """Add up the gradients of the pieces of a minibatch: they are those of the whole."""
        everybody = rows.steps["valid"].sum().clamp(min=1)
        total, reports, said, shares = torch.zeros_like(everybody, dtype=goal.returns.dtype), [], [], []
        for piece in _pieces(rows, knobs.accumulate):
            part, aim, heard = rows, goal, lessons
            if knobs.accumulate > 1:
                part, aim, heard = rows.rows(piece), goal.rows(piece), [each.rows(piece) for each in lessons]
            with nullcontext() if onlooker is None or reports else onlooker.saving():
                loss, report, judged = loss_of(
                    self.policy, part, aim, knobs.ppo, anchors=self.anchors, heard=heard
                )
            share = part.steps["valid"].sum().to(loss.dtype) / everybody
            (loss * share).backward()
            with torch.no_grad():
                total = total + loss * share
            reports.append(report)
            said.append(judged)
            shares.append(share)
        whole = Judged(*(torch.cat(each) for each in zip(*said, strict=True)))
        return total, joined(reports, shares), whole


def _pieces(rows: Segments, count: int) -> tuple[Int[Tensor, " rows"], ...]:
    """Cut rows into so many pieces."""
    return torch.arange(len(rows), device=rows.version.device).split(len(rows) // count)
