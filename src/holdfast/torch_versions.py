"""What differs between versions of torch or has no stable name: precision of products, what transforms code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

# From 2.9 on torch names a precision for each kind of product, and mixing those with the flags of before raises.
NAMES_PRECISIONS = torch.__version__ >= "2.9"
# Compared once: a comparison parses both versions.
_TELLS_EXPORT = torch.__version__ >= "2.7"
_KIND = _functorch.TransformType
_OPAQUE = {_KIND.Vmap, _KIND.Jvp} | (set() if torch.__version__ >= "2.11" else {_KIND.Grad})


def recurrent_tf32() -> bool:
    """Return whether torch's recurrent layers compute float32 products in tf32."""
    cudnn: Any = torch.backends.cudnn
    return cudnn.rnn.fp32_precision == "tf32" if NAMES_PRECISIONS else cudnn.allow_tf32


@contextmanager
def matmul_precision(*, tf32: bool) -> Iterator[None]:
    """Allow tf32 in matrix products, convolutions and recurrent layers, or not; restored on exit."""
    # Attributes that torch creates on import and its stubs do not declare.
    cudnn: Any = torch.backends.cudnn
    backends: list[Any] = [torch.backends.cuda.matmul, *([cudnn.conv, cudnn.rnn] if NAMES_PRECISIONS else [cudnn])]
    key, value = ("fp32_precision", "tf32" if tf32 else "ieee") if NAMES_PRECISIONS else ("allow_tf32", tf32)
    before = [getattr(backend, key) for backend in backends]
    try:
        for backend in backends:
            setattr(backend, key, value)
        yield
    finally:
        for backend, setting in zip(backends, before, strict=True):
            setattr(backend, key, setting)


def has_mixed_products() -> bool:
    """Return whether 16-bit matrices can be multiplied into 32 bits."""
    return torch.__version__ >= "2.8"


def mixed_product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply two 16-bit matrices on a GPU into one of 32 bits."""
    return torch.mm(a, b, out_dtype=torch.float32)


def is_exporting() -> bool:
    """Return whether `torch.export` traces; torch before 2.7 does not tell it from `torch.compile`."""
    return torch.compiler.is_exporting() if _TELLS_EXPORT else torch.compiler.is_compiling()


def is_opaque() -> bool:
    """Return whether `torch.func` transforms this code so that recurrent kernels fail or masks cannot be read.

    That is within `vmap` and `jvp`, and within `grad` of torch before 2.11.
    """
    if torch.compiler.is_compiling():
        return False
    return any(level.key() in _OPAQUE for level in _functorch.get_interpreter_stack() or ())
