import jaxtyping
import pytest
from hypothesis import settings

# A shared machine may pause any test; how long one takes says nothing about whether it is right.
settings.register_profile("calm", deadline=None)
settings.load_profile("calm")


@pytest.fixture
def annotations_asleep():
    """torch.compile cannot trace through the checks of shapes that run in tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
