"""How much better an action was than expected."""

import torch

from holdfast.experience.worth import scan_back, shift_in, worth_before
from holdfast.shapes import Bool, Float, Tensor


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
    """Generalised advantage estimation (Schulman et al. 2016), with truncation told from termination.

    delta[t] = r[t+1] + gamma V'[t+1] - V[t]        A[t] = delta[t] + gamma lam n[t+1] A[t+1]

    V' is 0 after a termination, the last observation's value after a truncation, else V[t+1]; n is 0
    where an episode ended. `next_*` came with the following step; `end_values` is V of the step after
    the last. Steps nobody acted in are stepped over: they weigh nothing and delay nothing.
    """
    ended, cut_value = next_terminated | next_truncated, torch.where(next_terminated, 0.0, next_last_values)
    delta = _surprise(values, valid, next_rewards, ended, cut_value, end_values, gamma)
    return _gathered(delta, torch.full_like(values, gamma * lam), valid, ended)


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
    """Estimate advantages of actions that another policy took (V-trace, Espeholt et al. 2018).

    delta[t] = min(ratio[t], rho) (r[t+1] + gamma V'[t+1] - V[t])
    A[t] = delta[t] + gamma lam min(ratio[t], c) n[t+1] A[t+1]

    `ratio` is how much likelier an action is now than when it was taken; where it is 1 and the clips are
    no less, this is `gae`, whose words hold here too.
    """
    ended, cut_value = next_terminated | next_truncated, torch.where(next_terminated, 0.0, next_last_values)
    delta = _surprise(values, valid, next_rewards, ended, cut_value, end_values, gamma)
    trace = gamma * lam * ratio.clamp(max=c_clip)
    return _gathered(ratio.clamp(max=rho_clip) * delta, trace, valid, ended)


def _surprise(
    values: Tensor,
    valid: Tensor,
    next_rewards: Tensor,
    ended: Tensor,
    cut_value: Tensor,
    end_values: Tensor,
    gamma: float,
) -> Tensor:
    """Compute r[t+1] + gamma V'[t+1] - V[t]; where nobody acted it is anything."""
    worth = worth_before(values, valid, ended, cut_value, end_values)
    next_worth = torch.where(ended, cut_value, shift_in(worth, end_values))
    return next_rewards + gamma * next_worth - values


def _gathered(delta: Tensor, trace: Tensor, valid: Tensor, ended: Tensor) -> Tensor:
    """Solve A[t] = delta[t] + trace[t] n[t+1] A[t+1], stepping over steps nobody acted in."""
    keep = torch.where(valid, trace, 1.0) * ~ended
    return scan_back(torch.where(valid, delta, 0.0), keep, delta.new_zeros(len(delta))) * valid
