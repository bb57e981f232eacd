import os
import signal

import jaxtyping
import pytest
import torch
from hypothesis import Phase, settings

from helpers import annotation_checks

# A runner may ignore these signals, and processes that tests start would inherit that.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Some virtual machines report matrix units that they do not have: a product in bfloat16 ends the process
# there. oneDNN asks when it is first used, and processes that tests start ask too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Without a GPU Triton's interpreter runs our kernels; it asks when they are first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Before the first import of holdfast.
annotation_checks.install()

# A shared machine may pause any test: its duration is no error.
settings.register_profile("calm", deadline=None)
# `make mutants` needs to know that a test fails, not the smallest example of it.
settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
settings.load_profile("calm")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture
def annotations_asleep():
    """torch.compile cannot trace through the checks of shapes that run in tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
