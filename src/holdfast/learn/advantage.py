"""How much better an action was than expected."""

import torch

from holdfast.shapes import Bool, Float, Tensor


def scan_back(
    add: Float[Tensor, "B T"], keep: Float[Tensor, "B T"], end: Float[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """Solve y[t] = add[t] + keep[t] y[t+1] with y[T] = end, by doubling: log2(T) steps, no loop over T."""
    add, keep = torch.cat([add, end[:, None]], dim=1), torch.cat([keep, 0 * end[:, None]], dim=1)
    reach = 1
    while reach < add.shape[1]:
        ahead_add = torch.nn.functional.pad(add[:, reach:], (0, reach))
        ahead_keep = torch.nn.functional.pad(keep[:, reach:], (0, reach))
        add, keep = add + keep * ahead_add, keep * ahead_keep
        reach *= 2
    return add[:, :-1]


def shift_in(x: Tensor, tail: Tensor) -> Tensor:
    """Let step t see what came with step t+1; the last one sees its tail."""
    return torch.cat([x[:, 1:], tail[:, None]], dim=1)


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
    cut_value = torch.where(next_truncated & ~next_terminated, next_last_values, 0.0)
    # What step t is worth to the one before it: its value, or if nobody acted, what comes after.
    stand_in = torch.where(valid, values, torch.where(ended, cut_value, 0.0))
    worth = scan_back(stand_in, (~valid & ~ended).to(values.dtype), end_values)
    next_worth = torch.where(ended, cut_value, shift_in(worth, end_values))
    delta = torch.where(valid, next_rewards + gamma * next_worth - values, 0.0)
    keep = torch.where(valid, torch.full_like(values, gamma * lam), 1.0) * ~ended
    return scan_back(delta, keep, torch.zeros_like(end_values)) * valid
