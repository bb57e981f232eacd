"""LSTM and GRU over segments with clears inside, in Triton; the cells above decide when they are used.

`operators` imports Triton, which not every machine has: it is imported when a kernel is about to run.
"""

import os
from functools import cache
from importlib.util import find_spec

import torch

from holdfast.memory.kernels.choices import Choices, adopt, all_chosen

__all__ = ["DTYPES", "Choices", "adopt", "all_chosen", "refusal"]

NARROWEST, WIDEST, UNIT = 16, 512, 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)
"""Compute capability of the first chips with bfloat16 and copies that run by themselves."""


def refusal(device: torch.device, hidden_size: int) -> str | None:
    """Say why the kernels cannot run a layer there; none: they can."""
    if hidden_size % UNIT or not NARROWEST <= hidden_size <= WIDEST:
        return f"they take hidden sizes of {NARROWEST} to {WIDEST} in steps of {UNIT}, not {hidden_size}"
    return refused_on(device)


@torch.compiler.assume_constant_result
def refused_on(device: torch.device) -> str | None:
    """Say why the kernels cannot run on a device at all; none: they can."""
    return _refused_on(device)


@cache
def _refused_on(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "they are written for CUDA"
    if device.type == "cuda":
        chip = torch.cuda.get_device_capability(device)
        return None if chip >= OLDEST else f"they need compute capability {OLDEST}, this GPU has {chip}"
    # Triton's interpreter runs them on a CPU, step by step, for tests.
    return (
        None if os.environ.get("TRITON_INTERPRET") == "1" else f"they need a GPU, and this is a {device.type}"
    )
