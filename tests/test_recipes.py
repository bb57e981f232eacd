import pytest

from holdfast.config import change
from holdfast.recipes import DEFAULT, RECIPES, find_recipe
from holdfast.worlds import WORLDS


def test_there_is_one_for_every_world():
    assert list(RECIPES) == list(WORLDS)
    assert DEFAULT in RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_a_run_of_fast_in_its_world(name):
    config = find_recipe(name)
    assert config.world.name == name
    assert config.policy.name == "fast"
    assert config == change(config, {})


def test_a_little_world_may_have_another_number_of_agents():
    config = change(find_recipe("n_back"), {"world.agents": 32})
    assert config.rollout_length == 32
