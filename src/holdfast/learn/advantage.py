"""GAE, V-trace, returns."""

from dataclasses import dataclass

import torch

from holdfast.rollout import Segments
from holdfast.rollout.segments import next_values, reverse_scan, segment_end_values, shift_left
from holdfast.types import Bool, Float, Int, Tensor


def gae(
    values: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    next_rewards: Float[Tensor, "B T"],
    next_terminated: Bool[Tensor, "B T"],
    next_truncated: Bool[Tensor, "B T"],
    next_last_values: Float[Tensor, "B T"],
    end_values: Float[Tensor, " B"],
    *,
    gamma: float,
    lam: float,
) -> Float[Tensor, "B T"]:
    """Generalized advantage estimation (Schulman et al. 2016) with truncation bootstrap.

    delta[t] = r[t+1] + gamma V'[t+1] - V[t]        A[t] = delta[t] + gamma lam n[t+1] A[t+1]

    V' is 0 after a termination, the last observation's value after a truncation, else V[t+1]; n is 0
    where an episode ended. `next_*` came with the following step; `end_values` is V of the step after
    the last. Invalid steps are skipped: they have no advantage and do not discount.
    """
    ended, cut_value = next_terminated | next_truncated, torch.where(next_terminated, 0.0, next_last_values)
    delta = _td_error(values, valid, next_rewards, ended, cut_value, end_values, gamma)
    return _discounted_sum(delta, torch.full_like(values, gamma * lam), valid, ended)


def vtrace(
    values: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    next_rewards: Float[Tensor, "B T"],
    next_terminated: Bool[Tensor, "B T"],
    next_truncated: Bool[Tensor, "B T"],
    next_last_values: Float[Tensor, "B T"],
    end_values: Float[Tensor, " B"],
    ratio: Float[Tensor, "B T"],
    *,
    gamma: float,
    lam: float,
    rho_clip: float,
    c_clip: float,
) -> Float[Tensor, "B T"]:
    """Off-policy advantages (V-trace, Espeholt et al. 2018).

    delta[t] = min(ratio[t], rho) (r[t+1] + gamma V'[t+1] - V[t])
    A[t] = delta[t] + gamma lam min(ratio[t], c) n[t+1] A[t+1]

    `ratio` is pi_now(a) / pi_rollout(a); at 1, with clips of at least 1, this is `gae`. All else is as there.
    """
    ended, cut_value = next_terminated | next_truncated, torch.where(next_terminated, 0.0, next_last_values)
    delta = _td_error(values, valid, next_rewards, ended, cut_value, end_values, gamma)
    trace = gamma * lam * ratio.clamp(max=c_clip)
    return _discounted_sum(ratio.clamp(max=rho_clip) * delta, trace, valid, ended)


def _td_error(
    values: Tensor,
    valid: Tensor,
    next_rewards: Tensor,
    ended: Tensor,
    cut_value: Tensor,
    end_values: Tensor,
    gamma: float,
) -> Tensor:
    """Compute r[t+1] + gamma V'[t+1] - V[t]; undefined at invalid steps."""
    bootstrap = shift_left(next_values(values, valid, ended, cut_value, end_values), end_values)
    return next_rewards + gamma * torch.where(ended, cut_value, bootstrap) - values


def _discounted_sum(delta: Tensor, trace: Tensor, valid: Tensor, ended: Tensor) -> Tensor:
    """Solve A[t] = delta[t] + trace[t] n[t+1] A[t+1], skipping invalid steps."""
    keep = torch.where(valid, trace, 1.0) * ~ended
    return reverse_scan(torch.where(valid, delta, 0.0), keep, delta.new_zeros(len(delta))) * valid


@dataclass(frozen=True)
class Targets:
    """Advantages and returns of segments."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"]

    def rows(self, index: Int[Tensor, " rows"]) -> "Targets":
        """Select rows."""
        return Targets(self.advantages[index], self.returns[index])


@torch.no_grad()
def refresh_bootstrap(segments: Segments) -> None:
    """Set each row's bootstrap value to the next row's latest value; that of an agent's last row stays."""
    horizon = segments.steps.shape[1]
    shape = segments.agent_shape
    steps = segments.steps.unflatten(0, shape).flatten(1, 2)
    after = segments.tail.unflatten(0, shape)[:, -1]
    values = segment_end_values(steps["values_now"], steps, after, horizon)
    segments.tail["values"].copy_(values.flatten(0, 1))
