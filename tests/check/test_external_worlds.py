"""All laws hold on policies made for worlds of other packages."""

import pytest

import holdfast
from holdfast.worlds import closing_world, make_world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]


@pytest.mark.parametrize(
    ("name", "agents"),
    [("mettagrid:tmaze", 8), ("pettingzoo:helpers.pettingzoo_envs:Guests", 6), ("envpool:CartPole-v1", 8)],
)
def test_policy_for_an_external_world_obeys_every_law(name, agents):
    pytest.importorskip(name.partition(":")[0])
    with closing_world(make_world(name, agents)) as world:
        policy = holdfast.make_policy("auto", world, seed=0, hidden_size=16)
        laws = holdfast.check(policy, world)
    assert laws.ok, str(laws)
    assert laws["replay"].measured <= 1e-5
