"""What a step is worth to the one before it, also where nobody acted in between."""

import torch
from tensordict import TensorDictBase

from holdfast.shapes import Bool, Float, Tensor


def scan_back(
    add: Float[Tensor, "B T"], keep: Float[Tensor, "B T"], end: Float[Tensor, " B"]
) -> Float[Tensor, "B T"]:
    """Solve y[t] = add[t] + keep[t] y[t+1] with y[T] = end, by doubling: log2(T) steps, no loop over T."""
    add, keep = torch.cat([add, end[:, None]], dim=1), torch.nn.functional.pad(keep, (0, 1))
    reach = 1
    while reach < add.shape[1]:
        ahead_add = torch.nn.functional.pad(add[:, reach:], (0, reach))
        ahead_keep = torch.nn.functional.pad(keep[:, reach:], (0, reach))
        # By selection: what is not kept may be anything, NaN too.
        add, keep = add + torch.where(keep == 0, 0.0, keep * ahead_add), keep * ahead_keep
        reach *= 2
    return add[:, :-1]


def shift_in(x: Tensor, tail: Tensor) -> Tensor:
    """Let step t see what came with step t+1; the last one sees its tail."""
    return torch.cat([x[:, 1:], tail[:, None]], dim=1)


def worth_before(
    values: Float[Tensor, "B T"],
    valid: Bool[Tensor, "B T"],
    next_ended: Bool[Tensor, "B T"],
    next_cut_value: Float[Tensor, "B T"],
    end_values: Float[Tensor, " B"],
) -> Float[Tensor, "B T"]:
    """Say what each step is worth to the one before it.

    That is its value; where nobody acted it is what the next step is worth, or if the episode ended
    there, what its last observation was worth.
    """
    stand_in = torch.where(valid, values, torch.where(next_ended, next_cut_value, 0.0))
    return scan_back(stand_in, (~valid & ~next_ended).to(values.dtype), end_values)


def worth_at_edges(
    values: Float[Tensor, "A L"], steps: TensorDictBase, after: TensorDictBase, horizon: int
) -> Float[Tensor, "A S"]:
    """Say what the step after each segment is worth to the segment's last.

    `steps[A,L]` are those of a rollout, in order; `after[A]` is what came after its last one.
    """
    ended = {key: shift_in(steps[key], after[key]) for key in ("dones", "truncateds")}
    last_values = shift_in(steps["last_values"], after["last_values"])
    worth = worth_before(
        values,
        steps["valid"],
        ended["dones"] | ended["truncateds"],
        torch.where(ended["dones"], 0.0, last_values),
        after["values"],
    )
    return torch.cat([worth[:, horizon::horizon], after["values"][:, None]], dim=1)
