import pytest

from holdfast.config import change
from holdfast.recipes import DEFAULT, ELSEWHERE, RECIPES, find_recipe, recipe_for
from holdfast.worlds import WORLDS


def test_there_is_one_for_every_world():
    assert [name for name in RECIPES if name in WORLDS] == list(WORLDS)
    assert {DEFAULT, ELSEWHERE} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_a_run_of_fast_in_its_world(name):
    config = find_recipe(name)
    assert config.world.name.replace(":", "_") == name or name in (
        "general",
        "cartpole",
        "envpool_cartpole",
        "popgym_repeat_first",
        "popgym_cartpole",
    )
    assert config.policy.name == "fast"
    assert config == change(config, {})


def test_a_pole_is_a_pole_wherever_it_stands():
    here, there = find_recipe("cartpole"), find_recipe("envpool_cartpole")
    assert here.world.keep == there.world.keep == (0, 2)
    assert here.model_copy(update={"world": there.world}) == there


def test_a_little_world_may_have_another_number_of_agents():
    config = change(find_recipe("n_back"), {"world.agents": 32})
    assert config.rollout_length == 32


@pytest.mark.parametrize(
    ("world", "recipe"),
    [
        (None, "recall"),
        ("tmaze", "tmaze"),
        ("mixture", "recall"),
        ("gym:CartPole-v1", "general"),
        ("mine.world:World", "general"),
    ],
)
def test_a_world_has_its_own_recipe_where_none_is_named(world, recipe):
    assert recipe_for(world) == recipe
