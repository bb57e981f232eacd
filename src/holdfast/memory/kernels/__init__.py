"""LSTM and GRU over segments with clears inside, in Triton; rnn.py decides when they run.

`ops` imports Triton, which not every machine has, so it is imported when a kernel is about to run.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch

from holdfast.memory.kernels.autotune import PlanTable, all_plans, load_plans

__all__ = ["DTYPES", "PlanTable", "all_plans", "load_plans", "refusal"]

MIN_HIDDEN, MAX_HIDDEN, MULTIPLE = 16, 512, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_CAPABILITY = (8, 0)
"""First compute capability with bfloat16 and asynchronous copies."""


def refusal(device: torch.device, hidden_size: int) -> str | None:
    """Return why the kernels cannot run a layer on a device; None: they can."""
    if hidden_size % MULTIPLE or not MIN_HIDDEN <= hidden_size <= MAX_HIDDEN:
        sizes = f"{MIN_HIDDEN} to {MAX_HIDDEN} in steps of {MULTIPLE}"
        return f"they take hidden sizes of {sizes}, not {hidden_size}"
    return refused_on(device)


@torch.compiler.assume_constant_result
def refused_on(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device; None: they can."""
    return _refused_on(device)


@cache
def _refused_on(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "they are written for CUDA"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        too_old = f"they need compute capability {MIN_CAPABILITY}, not {capability}"
        return None if capability >= MIN_CAPABILITY else too_old
    # Triton's interpreter runs them on a CPU, for tests.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return None if interpreted else f"they need a GPU, not a {device.type}"
