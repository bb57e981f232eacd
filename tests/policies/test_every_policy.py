"""Slow: every policy, graphs, and every memory obey every law."""

import pytest

import holdfast
from holdfast import make_policy, make_world
from holdfast.memory import CELLS
from holdfast.policies import POLICIES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]
# Other tests show that a graph gives the outputs and gradients of its class.
FORMS = [*POLICIES, "component:example"]


def require_all(laws):
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
    assert len(laws) == 10


@pytest.mark.parametrize("name", FORMS)
def test_every_policy_obeys_the_laws(name):
    laws = holdfast.check(name)
    require_all(laws)
    assert laws["carry"].measured > 0


@pytest.mark.parametrize(
    ("form", "memory"),
    [*(("fast", name) for name in CELLS if name != "lstm"), ("component:latent_attn_tiny", "gru")],
)
def test_every_cell_obeys_the_laws(form, memory):
    world = make_world("recall", agents=8)
    laws = holdfast.check(make_policy(form, world, seed=0, memory=memory, hidden_size=24), world)
    require_all(laws)
    assert (laws["carry"].worst.path == "n/a") == (memory == "none")
