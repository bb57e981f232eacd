"""Advantages and bootstrap values of a trainer, read from the gradient of its value loss.

The gradient of a squared error `(V - R)^2` in a value is proportional to `V - R`, and a return is `R = A + V`: so the
gradients of all values, up to one factor, are the advantages that the trainer computed, whatever it calls them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from holdfast.check.results import Measurement, not_measured
from holdfast.check.trainer.recording import HeadCall, Kind, TrainerRecording
from holdfast.check.trainer.script import NONE, TrainerScript

BOUND = 1e-3
"""Largest error of a reward or value, relative to max(1, |x|): gradients are float32 and scaled."""
SAME = 1e-5
"""Largest difference of a replayed value from the rollout's, relative to max(1, |x|)."""
FIT = 0.9
"""Share of steps that must fit for a rule to explain the advantages."""
GRID = (0.0, 0.8, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)
MSE = "a squared-error value loss, averaged over a minibatch"
Rows = np.ndarray
"""Numbers by step and environment, NaN where there is none."""


@dataclass(frozen=True)
class Returns:
    """What is known of values, rewards and advantages, `[S,E]`."""

    recording: TrainerRecording
    gamma: float
    lam: float

    @property
    def script(self) -> TrainerScript:
        """The script of the environments."""
        return self.recording.script

    @cached_property
    def calls(self) -> list[HeadCall]:
        """The calls of the value head that has gradients most often."""
        trained = [calls for calls in self.recording.values.values() if any(_has_gradient(call) for call in calls)]
        return max(trained, key=lambda calls: sum(map(_has_gradient, calls)), default=[])

    @cached_property
    def _values(self) -> tuple[dict[int, float], dict[int, float]]:
        """The first and the latest value when acting, by observation.

        Where a trainer computes values after a rollout, those of its steps come before those of their next steps.
        """
        first, latest = dict[int, float](), dict[int, float]()
        kind = kind_of_rollout(self.calls)
        for call in self.calls:
            if call.kind == kind:
                for number, value in zip(call.ids.tolist(), call.output[:, 0].tolist(), strict=True):
                    first.setdefault(number, value)
                    latest[number] = value
        return (first, latest) if kind == "act" else (latest, first)

    @property
    def first_value(self) -> dict[int, float]:
        """The first value of each observation: at the end of a rollout, that of the bootstrap."""
        return self._values[0]

    @cached_property
    def gradients(self) -> dict[int, tuple[float, int]]:
        """The negative gradient of each observation's first value in an update, times rows, and when it was.

        Values that are not those of the rollout are left out: their gradients say nothing of its advantages.
        """
        result, acting = dict[int, tuple[float, int]](), self._values[1]
        for call in self.calls:
            if call.gradient is None or call.kind != "learn":
                continue
            # The gradient of a padded row is 0.
            rows = int((call.gradient != 0).sum())
            columns = (call.ids.tolist(), call.gradient[:, 0].tolist(), call.output[:, 0].tolist())
            for number, gradient, value in zip(*columns, strict=True):
                if number in acting and abs(value - acting[number]) <= SAME * max(1, abs(value)):
                    result.setdefault(number, (-gradient * rows, call.time))
        return result

    def rows(self, read: Callable[[int], float]) -> Rows:
        """Read a number for every observation that was acted on."""
        table = [[read(number) for number in step.ids.tolist()] for step in self.script.transitions]
        return np.array(table, dtype=float).reshape(-1, self.script.envs)

    @cached_property
    def v(self) -> Rows:
        """Values of the observations acted on."""
        return self.rows(lambda number: self._values[1].get(number, np.nan))

    @cached_property
    def v_next(self) -> Rows:
        """Values of the observations that follow."""
        ids = [
            [self.first_value.get(number, np.nan) for number in step.next_ids.tolist()]
            for step in self.script.transitions
        ]
        return np.array(ids, dtype=float)

    @cached_property
    def a(self) -> Rows:
        """Advantages up to a factor."""
        return self.rows(lambda number: self.gradients.get(number, (np.nan, 0))[0])

    @cached_property
    def update(self) -> Rows:
        """Steps of the environments before the update that trained on an observation."""
        return self.rows(lambda number: self.gradients.get(number, (0.0, np.nan))[1])

    @cached_property
    def r(self) -> Rows:
        """Rewards of the actions."""
        return np.stack([step.reward for step in self.script.transitions]).astype(float)

    @cached_property
    def ended(self) -> np.ndarray:
        """Where an episode ended."""
        return np.stack([step.ended for step in self.script.transitions])

    @cached_property
    def inner(self) -> np.ndarray:
        """Steps whose next step is of the same episode and update."""
        same = _shift(self.update, 1) == self.update
        return same & ~self.ended

    def factor(self, gamma: float, lam: float, a: Rows, r: Rows) -> tuple[float, Rows]:
        """Return the factor of the advantages that fits most inner steps, and the errors of all of them."""
        left, right = a - gamma * lam * _shift(a, 1), r + gamma * self.v_next - self.v
        usable = self.inner & np.isfinite(left) & np.isfinite(right)
        steep = usable & (np.abs(left) > 1e-3 * np.abs(left[usable]).max(initial=0.0))
        if not steep.any():
            return np.nan, np.full_like(left, np.nan)
        factor = float(np.median(right[steep] / left[steep]))
        return factor, np.where(usable, np.abs(factor * left - right) / np.maximum(1, np.abs(right)), np.nan)

    @cached_property
    def fit(self) -> tuple[float, Rows]:
        """The factor under GAE as it is written, and the errors."""
        return self.factor(self.gamma, self.lam, self.a, self.r)

    def why_not(self) -> str:
        """Say why advantages cannot be read; empty if they can."""
        if not self.calls:
            return "no linear layer with one output has gradients in updates"
        if not np.isfinite(self.fit[0]):
            return "no two steps in a row were replayed with the values of the rollout"
        return ""


def kind_of_rollout(calls: list[HeadCall]) -> Kind:
    """Return which calls give a rollout's outputs: acting, or whole rollouts without gradients if a head never acts."""
    return "act" if any(call.kind == "act" for call in calls) else "recompute"


def _has_gradient(call: HeadCall) -> bool:
    return call.gradient is not None and call.kind == "learn"


def _shift(x: Rows, by: int) -> Rows:
    """Return the row `by` steps later, NaN beyond the end."""
    result = np.full_like(x, np.nan, dtype=float)
    if by > 0:
        result[:-by] = x[by:]
    else:
        result[-by:] = x[:by]
    return result


def share(errors: Rows) -> float:
    """Return the share of the measured steps within the bound."""
    measured = errors[np.isfinite(errors)]
    return float((measured <= BOUND).mean()) if len(measured) else 0.0


def advantage(returns: Returns) -> list[Measurement]:
    """Between neighbouring steps of an episode, advantages follow GAE with the given gamma and lambda."""
    what = "temporal differences that advantages imply"
    if reason := returns.why_not():
        return [not_measured(what, f"{reason}; measured with {MSE}")]
    _, errors = returns.fit
    worst = float(np.nanmax(errors))
    if worst <= BOUND:
        return [Measurement(what, worst, BOUND)]
    step, env = (int(index) for index in np.argwhere(errors > BOUND)[0])
    place = returns.script.place(int(returns.script.transitions[step].ids[env]))
    finding = (
        f"{place}: off by {errors[step, env]:.1e}, must be r + gamma V' - V, as in GAE with gamma={returns.gamma:g} "
    )
    finding += f"and lambda={returns.lam:g} ({int((errors > BOUND).sum())} of {int(np.isfinite(errors).sum())})"
    return [Measurement(what, worst, BOUND, finding=f"{finding}; {_advantage_rule(returns)}")]


def _advantage_rule(returns: Returns) -> str:
    """Return the change of the formula that explains the advantages."""
    gamma, lam, a, r = returns.gamma, returns.lam, returns.a, returns.r
    for words, changed_a, changed_r in (
        ("advantages are one step late", _shift(a, 1), r),
        ("advantages are one step early", _shift(a, -1), r),
        ("rewards are one step late", a, _shift(r, -1)),
        ("rewards are one step early", a, _shift(r, 1)),
        ("rewards are left out", a, np.zeros_like(r)),
    ):
        if share(returns.factor(gamma, lam, changed_a, changed_r)[1]) >= FIT:
            return f"hypothesis: {words}"
    for other_gamma in (gamma, *GRID):
        for other in (lam, *GRID):
            if share(returns.factor(other_gamma, other, a, r)[1]) >= FIT:
                return (
                    f"it fits gamma={other_gamma:g} and lambda={other:g}: use these, or name them by --gamma and --lam"
                )
    if share(returns.fit[1]) >= 0.5:
        return "hypothesis: some steps are weighted or computed differently"
    return f"no hypothesis explains it; the measurement needs {MSE}"


def bootstrap(returns: Returns) -> list[Measurement]:
    """The value after a step is 0 after a termination, the final observation's after a truncation, else the next's."""
    names = ("values after terminations", "values after truncations", "values at the ends of rollouts")
    reason = returns.why_not()
    if reason or share(returns.fit[1]) < FIT:
        return [not_measured(name, reason or "advantage is broken, fix it first") for name in names]
    factor = returns.fit[0]
    used = (factor * returns.a - returns.r + returns.v) / returns.gamma
    steps = returns.script.transitions
    terminated = np.stack([step.terminated for step in steps])
    last = ~returns.ended & ~returns.inner & np.isfinite(returns.update)
    last &= returns.update == np.arange(1, len(steps) + 1)[:, None]
    finals = np.array(
        [[returns.first_value.get(n, np.nan) for n in step.final_ids.tolist()] for step in steps], dtype=float
    )
    kinds = (
        (terminated, np.zeros_like(used), "0, the episode is over"),
        (returns.ended & ~terminated, finals, "the value of the final observation"),
        (last, returns.v_next, "the value of the next observation"),
    )
    return [_compare(returns, name, used, finals, *kind) for name, kind in zip(names, kinds, strict=True)]


def _compare(
    returns: Returns, what: str, used: Rows, finals: Rows, where: np.ndarray, expected: Rows, must: str
) -> Measurement:
    where = where & np.isfinite(used)
    if not where.any():
        return not_measured(what, "no such step was trained on")
    errors = np.where(where, np.abs(used - expected) / np.maximum(1, np.abs(expected)), 0.0)
    errors = np.where(where & ~np.isfinite(errors), np.inf, errors)
    wrong = errors > BOUND
    if not wrong.any():
        return Measurement(what, float(errors.max()), BOUND)
    step, env = (int(index) for index in np.argwhere(wrong)[0])
    place = returns.script.place(int(returns.script.transitions[step].ids[env]))
    is_known = np.isfinite(expected[step, env])
    size = f", {expected[step, env]:.4f}" if is_known else ", which the trainer did not compute"
    finding = f"after {place}: {used[step, env]:.4f} is used, must be {must}{size} ({int(wrong.sum())} of "
    finding += f"{int(where.sum())}); {_bootstrap_rule(returns, used, finals, wrong)}"
    return Measurement(what, float(errors.max()), BOUND, finding=finding)


def _bootstrap_rule(returns: Returns, used: Rows, finals: Rows, wrong: np.ndarray) -> str:
    """Return the value that explains what was used in all wrong places."""
    factor = returns.fit[0]
    same = _shift(returns.update, 1) == returns.update
    summed = returns.v_next + np.where(same, returns.lam * factor * _shift(returns.a, 1), 0.0)
    for words, candidate in (
        ("treated as a termination, the bootstrap is 0", np.zeros_like(used)),
        ("bootstraps from the first observation of the next episode, or the next one", returns.v_next),
        ("bootstraps from the value of the step before the end, an approximation", returns.v),
        ("bootstraps from the final observation", finals),
        ("the end is ignored, advantages run on into the next episode", summed),
        ("bootstraps from the observation one step later", _shift(returns.v_next, 1)),
    ):
        near = np.abs(used - candidate) <= BOUND * np.maximum(1, np.abs(candidate))
        if near[wrong].all():
            return f"hypothesis: {words}"
    return "no hypothesis explains it"


def heads_replay(recording: TrainerRecording) -> list[Measurement]:
    """Values and logits in updates are those of the rollout."""
    parts = []
    for name, modules in (("values", recording.values), ("logits", recording.logits)):
        calls = [call for calls in modules.values() for call in calls]
        for calls in modules.values():
            if any(call.kind == "learn" for call in calls):
                parts += [_strange_rows(name, calls), _head_replay(recording.script, name, calls)]
        if not calls:
            parts.append(not_measured(f"{name}, update", "no linear layer of that size has gradients in updates"))
    return parts


def _strange_rows(name: str, calls: list[HeadCall]) -> Measurement:
    """Count rows that the loss reads and whose inputs are those of no step; padded rows have no gradient."""
    learnt = [call for call in calls if call.gradient is not None and call.kind == "learn"]
    count = sum(int(((call.gradient != 0).any(1) & (call.ids == NONE)).sum()) for call in learnt)
    finding = "hypothesis: what lies between the memory and the head differs in updates"
    return Measurement(f"{name} of inputs unlike the rollout's, update", float(count), finding=finding)


def _head_replay(script: TrainerScript, name: str, calls: list[HeadCall]) -> Measurement:
    acting: dict[int, torch.Tensor] = {}
    worst, wrong, count, finding = 0.0, 0, 0, ""
    kind = kind_of_rollout(calls)
    for call in calls:
        for number, row in zip(call.ids.tolist(), call.output, strict=True):
            if call.kind == kind:
                acting.setdefault(number, row) if kind == "recompute" else acting.update({number: row})
            elif call.kind == "learn" and number in acting:
                expected, count = acting[number], count + 1
                error = float(((row - expected).abs().max() / expected.abs().max().clamp(min=1)).nan_to_num(torch.inf))
                if error > SAME:
                    finding = finding or f"{script.place(number)}: off by {error:.1e}, must be that of the rollout"
                    wrong += 1
                worst = max(worst, error)
    if not count:
        return not_measured(f"{name}, update", "no step of the rollout was identified")
    return Measurement(f"{name}, update", worst, SAME, finding=f"{finding} ({wrong} of {count})" if wrong else "")
