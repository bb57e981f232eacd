import jaxtyping
import pytest


@pytest.fixture
def annotations_asleep():
    """torch.compile cannot trace through the checks of shapes that run in tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
