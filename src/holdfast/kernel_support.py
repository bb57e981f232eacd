"""Whether Triton kernels can run on a device."""

import logging
import os
from functools import cache
from importlib.util import find_spec

import torch
from torch.torch_version import TorchVersion

MIN_TRITON = "3.6"
"""The first version the kernels were measured with, that of torch 2.10."""
MIN_CAPABILITY = (8, 0)
"""First compute capability with bfloat16 and asynchronous copies."""


def refused_on(device: torch.device) -> str | None:
    """Return why the kernels cannot run on a device; None: they can. An old Triton is logged, once."""
    return _refused_on(device)


# What the decorator torch.compiler.assume_constant_result sets; it imports the compiler, which takes a second.
vars(refused_on)["_dynamo_marked_constant"] = True


@cache
def _refused_on(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed"
    if torch.version.hip is not None:
        return "they are written for CUDA"
    # Triton's interpreter runs them on a CPU, for tests.
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if (device.type == "cuda" or interpreted) and (old := _old_triton()) is not None:
        logging.getLogger("holdfast").warning("Without Triton kernels, torch's own run on %s: %s.", device, old)
        return old
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        too_old = f"they need compute capability {MIN_CAPABILITY}, not {capability}"
        return None if capability >= MIN_CAPABILITY else too_old
    return None if interpreted else f"they need a GPU, not a {device.type}"


def _old_triton() -> str | None:
    import triton

    version = TorchVersion(triton.__version__)
    return None if version >= MIN_TRITON else f"they need Triton {MIN_TRITON} or newer, not {version}"
