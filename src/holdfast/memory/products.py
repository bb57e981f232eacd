"""How matrix products of float32 are made on a GPU: in full, or of numbers rounded to tf32."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def products(*, tf32: bool) -> Iterator[None]:
    """Let products, convolutions and recurrent layers round to tf32 or not; put back what was before."""
    # Attributes that torch makes when it is imported, and that no stub tells of.
    cudnn: Any = torch.backends.cudnn
    backends: list[Any] = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "tf32" if tf32 else "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
