"""Compatibility of Triton's interpreter with NumPy 2.4."""

import importlib.util
import os

import pytest
import torch

from holdfast import kernel_support

REFUSAL = kernel_support.refused_on(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
needs_kernels = pytest.mark.skipif(REFUSAL is not None and "Triton" in REFUSAL, reason=f"no kernels here: {REFUSAL}")


def repair() -> None:
    """Allow kernel scalars as loop bounds: NumPy 2.4 no longer converts arrays of one entry to int."""
    if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor
    if patch.__module__ == __name__:
        return

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
