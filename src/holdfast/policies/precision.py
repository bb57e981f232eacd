"""What the layers of a policy compute in, and how its last layers stay in full precision all the same."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from holdfast.shapes import Float, Tensor

Precision = Literal["float32", "bfloat16"]
LOW = (torch.bfloat16, torch.float16)


def computing(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Let products inside be computed in some precision; weights, states and sums stay as they are."""
    return nullcontext() if precision == "float32" else torch.autocast(device.type, torch.bfloat16)


def in_full(layer: Callable[..., Tensor], *inputs: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Call the last layer of a head in full precision, whatever is computed in around it.

    Scores and values are differences of large sums: rounded to 8 bits they would move ratios by a
    percent. Everything before them may be rounded, and is what a policy's time goes into.
    """
    device = inputs[0].device.type
    if not torch.is_autocast_enabled(device):
        return layer(*inputs)
    with torch.autocast(device, enabled=False):
        return layer(*map(widened, inputs))


def widened(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Turn what was computed in 16 bits into float32."""
    return x.float() if x.dtype in LOW else x
