"""What is remembered: how large, how old, and how near its bounds."""

import torch

from holdfast.memory import saturation
from holdfast.monitor.cells import lengths, live_state
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Int, Tensor


@torch.no_grad()
def remembered(policy: LSTMWrapper, age: Int[Tensor, " A"] | None = None) -> dict[str, float]:
    """Measure the live memories of all agents, and the ages that were counted; nothing where there are none.

    `saturation` is absent where a memory has no bounds.
    """
    if not policy.has_memory() or not policy.store.slices:
        return {}
    state = live_state(policy)
    size = lengths(state)
    found = {"memory/state_norm": size.mean(), "memory/state_norm_max": size.max()}
    near = saturation(policy.lstm.cell, state)
    if near is not None:
        found["memory/saturation"] = near
    if age is not None:
        found |= {"memory/age_mean": age.double().mean(), "memory/age_max": age.max()}
    # All at once: looking at one number after the other would make the host wait for each.
    numbers = torch.stack([number.double() for number in found.values()]).tolist()
    return dict(zip(found, numbers, strict=True))
