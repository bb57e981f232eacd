"""Replay check: the laws replay and clear, measured during training on stored segments."""

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from holdfast.errors import ContractError
from holdfast.learn import replay
from holdfast.memory.episode_resets import reset_mask
from holdfast.policies import FunctionalPolicy, LSTMWrapper
from holdfast.policies.recurrent_policy import PolicyBatch
from holdfast.rollout import Segments
from holdfast.types import Float, Tensor
from holdfast.worlds.obs import where_obs


@dataclass(frozen=True)
class RoundingBound:
    """Bounds on rounding errors: on their mean, and on their 99.9 % quantile."""

    mean: float
    quantile: float

    def worst(self, error: Float[Tensor, "..."]) -> tuple[str, float, float]:
        """Return the statistic closer to its bound: its name, its size, and the bound."""
        # NaN becomes Inf, so that it sorts last and counts.
        error = error.flatten().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
        mean, high = float(error.mean()), float(error.kthvalue(max(1, round(0.999 * error.numel()))).values)
        if mean / self.mean >= high / self.quantile:
            return "on average", mean, self.mean
        return "in one of a thousand", high, self.quantile


BF16_BOUND = RoundingBound(mean=2e-3, quantile=5e-2)
"""Bounds for layers in bfloat16: its 8 bits make one rounding error up to 4e-3."""


def largest_allowed(bound: float | RoundingBound) -> float:
    """Largest error allowed for a single number."""
    return bound.quantile if isinstance(bound, RoundingBound) else bound


REPLAY_ALARM = 1e-4
"""Above this, the replay does not reproduce the rollout: the memory is broken."""
REPLAY_BOUNDS: dict[str, float | RoundingBound] = {"float32": REPLAY_ALARM, "bfloat16": BF16_BOUND}
"""By the policy's precision."""
CLEAR_ALARM = 1e-6
"""Above this, relative to the outputs, information crossed a reset; on one machine it is exactly 0."""
ROWS = 8
"""Number of segments checked: enough for every kind of episode start, few enough to be cheap."""


@torch.no_grad()
def check_segments(policy: LSTMWrapper, segments: Segments) -> dict[str, float]:
    """Measure replay and clear on the segments of a rollout, before any weight changes.

    Broken memory stops the run: otherwise training looks plausible, and never learns to use memory.
    """
    clear = reset_mask(segments.steps, policy.clear_on)
    # Rows with resets inside come first; before a reset in the first step there is nothing to leak.
    order = clear[:, 1:].sum(1).argsort(descending=True, stable=True)
    rows = segments.rows(order[:ROWS])
    replayed = replay(policy, rows)
    for key in ("values", "act_log_prob"):
        if not bool(torch.where(rows.steps["valid"], replayed[key], 0.0).isfinite().all()):
            raise ContractError(f"The policy's {key} are not finite; look for NaN in weights and observations.")
    error = _replay_error(rows.steps, replayed)
    metrics = {"memory/check_replay": float(error.max())}
    size, bound = _size_and_bound(policy, error[rows.steps["valid"]])
    if not size <= bound:
        _stop("replay", segments, order, error, size, bound)
    step = torch.arange(clear.shape[1], device=clear.device)
    last = torch.where(clear[order[:ROWS]], step, 0).amax(1)
    if bool((last > 0).any()):
        leak = _leak(policy, rows, replayed, last) * (last > 0)[:, None]
        metrics["memory/check_clear"] = float(leak.max())
        if not metrics["memory/check_clear"] <= CLEAR_ALARM:
            _stop("clear", segments, order, leak, metrics["memory/check_clear"], CLEAR_ALARM)
    return metrics


def replay_alarm(precision: str) -> float:
    """Largest replay error of an update's first minibatch that is still rounding."""
    return largest_allowed(REPLAY_BOUNDS[precision])


def _size_and_bound(policy: LSTMWrapper, error: Float[Tensor, " steps"]) -> tuple[float, float]:
    """Size of the errors, and the bound of the policy's precision."""
    bound = REPLAY_BOUNDS[policy.precision if isinstance(policy, FunctionalPolicy) else "float32"]
    if isinstance(bound, RoundingBound) and error.numel():
        return bound.worst(error)[1:]
    return float(error.max()) if error.numel() else 0.0, REPLAY_ALARM


def _replay_error(stored: TensorDictBase, replayed: PolicyBatch) -> Float[Tensor, "B T"]:
    ratio = (replayed["act_log_prob"] - stored["act_log_prob"]).exp() - 1
    values = (replayed["values"] - stored["values"]) / stored["values"].abs().clamp(min=1)
    return torch.where(stored["valid"], torch.maximum(ratio.abs(), values.abs()), 0.0)


def _leak(policy: LSTMWrapper, segments: Segments, old: PolicyBatch, last: Tensor) -> Float[Tensor, "B T"]:
    """Swap the steps before each row's last reset with another row's; return how outputs after it change."""
    other = torch.arange(len(segments), device=last.device).roll(1)
    steps = segments.steps.clone()
    step = torch.arange(steps.shape[1], device=last.device)
    before = step[None] < last[:, None]
    steps["env_obs"] = where_obs(before, steps["env_obs"][other], steps["env_obs"])
    entry, key = segments.entry_state[other], policy.actions.key
    new = replay(policy, Segments(steps, entry, segments.tail, segments.version))
    moved = torch.maximum((new["values"] - old["values"]).abs(), (new[key] - old[key]).abs().amax(-1))
    size = torch.maximum(old["values"].abs().max(), old[key].abs().max()).clamp(min=1)
    return torch.where(before | ~steps["valid"], 0.0, moved / size)


def _stop(law: str, segments: Segments, order: Tensor, error: Float[Tensor, "B T"], size: float, bound: float) -> None:
    """Raise, naming the law and the agent and step of the largest error."""
    problem = {
        "replay": "the replay does not reproduce the rollout",
        "clear": "steps before an episode start affect steps after it",
    }
    row, step = divmod(int(error.argmax()), error.shape[1])
    location = segments.describe(int(order[row]), step)
    raise ContractError(
        f"The memory is broken ({law}): {problem[law]}: off by {size:.1e} at {location}, limit {bound:.0e}. "
        "Run `holdfast check` on this policy to find the cause, or `holdfast check world:NAME` if the world "
        "may overwrite earlier observations; trainer.check=off trains without this check."
    )
