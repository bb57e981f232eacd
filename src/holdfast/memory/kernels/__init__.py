"""LSTM and GRU over segments with clears inside, in Triton; rnn.py decides when they run.

`ops` imports Triton, which not every machine has, so it is imported when a kernel is about to run.
"""

import torch

from holdfast.kernel_support import refused_on
from holdfast.memory.kernels.autotune import PlanTable, all_plans, load_plans

__all__ = ["DTYPES", "PlanTable", "all_plans", "load_plans", "refusal"]

MIN_HIDDEN, MAX_HIDDEN, MULTIPLE = 16, 512, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def refusal(device: torch.device, hidden_size: int) -> str | None:
    """Return why the kernels cannot run a layer on a device; None: they can."""
    if hidden_size % MULTIPLE or not MIN_HIDDEN <= hidden_size <= MAX_HIDDEN:
        sizes = f"{MIN_HIDDEN} to {MAX_HIDDEN} in steps of {MULTIPLE}"
        return f"they take hidden sizes of {sizes}, not {hidden_size}"
    return refused_on(device)
