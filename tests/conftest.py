import os

import jaxtyping
import pytest
import torch
from hypothesis import settings

# Some virtual machines tell of matrix units that they do not have: a product in bfloat16 ends the process
# there. oneDNN asks when it is first used, and processes that tests start ask too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Without a GPU Triton's interpreter runs our kernels; it asks when they are first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shared machine may pause any test; how long one takes says nothing about whether it is right.
settings.register_profile("calm", deadline=None)
settings.load_profile("calm")


@pytest.fixture
def annotations_asleep():
    """torch.compile cannot trace through the checks of shapes that run in tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
