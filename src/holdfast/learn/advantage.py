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
    ended = next_terminated | next_truncated
    cut_value = torch.where(next_terminated, 0.0, next_last_values)
    worth = worth_before(values, valid, ended, cut_value, end_values)
    next_worth = torch.where(ended, cut_value, shift_in(worth, end_values))
    delta = torch.where(valid, next_rewards + gamma * next_worth - values, 0.0)
    keep = torch.where(valid, torch.full_like(values, gamma * lam), 1.0) * ~ended
    return scan_back(delta, keep, torch.zeros_like(end_values)) * valid
