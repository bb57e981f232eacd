"""Recipes: their worlds, batch sizes and schedules."""

import pytest

from holdfast.config.run import override
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.recipes import DEFAULT, ELSEWHERE, RECIPES, find_recipe, recipe_for


def test_every_builtin_world_has_a_recipe():
    assert [name for name in RECIPES if name in WORLD_CONFIGS] == list(WORLD_CONFIGS)
    assert {DEFAULT, ELSEWHERE} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_config_of_fast(name):
    config = find_recipe(name)
    assert config.world.name.replace(":", "_") == name or name in (
        "general",
        "cartpole",
        "envpool_cartpole",
        "popgym_repeat_first",
        "popgym_cartpole",
    )
    assert config.policy.name == "fast"
    assert config == override(config, {})


def test_envpool_cartpole_equals_cartpole():
    gym, envpool = find_recipe("cartpole"), find_recipe("envpool_cartpole")
    assert gym.world.keep == envpool.world.keep == (0, 2)
    assert gym.model_copy(update={"world": envpool.world}) == envpool


def test_number_of_agents_can_be_overridden():
    config = override(find_recipe("n_back"), {"world.agents": 32})
    assert config.rollout_length == 32


@pytest.mark.parametrize(
    ("world", "recipe"),
    [
        (None, "recall"),
        ("tmaze", "tmaze"),
        ("mixture", "recall"),
        ("gym:CartPole-v1", "general"),
        ("package.world:World", "general"),
    ],
)
def test_default_recipe_of_a_world(world, recipe):
    assert recipe_for(world) == recipe


@pytest.mark.parametrize(
    ("name", "horizon", "segments", "minibatches"),
    [("n_back", 16, 1, 4), ("tmaze", 32, 1, 8), ("forage", 24, 2, 4), ("recall", 64, 1, 8)],
)
def test_batch_sizes_follow_from_agents_and_horizon(name, horizon, segments, minibatches):
    config = find_recipe(name)
    trainer = config.trainer
    assert trainer.batch_size == config.world.agents * horizon * segments
    assert trainer.minibatch_size * minibatches == trainer.batch_size
    assert config.rollout_length == horizon * segments
    assert trainer.bptt_horizon == horizon


def test_recall_discounts_distant_rewards_and_decays():
    config = find_recipe("recall")
    assert (config.trainer.ppo.gamma, config.trainer.ppo.gae_lambda) == (0.9, 0.8)
    assert (config.world.cues, config.world.delay) == (4, 8)
    ends = {item.key: (item.kind, item.end) for item in config.schedule}
    assert ends == {
        "trainer.optimizer.learning_rate": ("linear", 1e-4),
        "trainer.ppo.ent_coef": ("linear", 0.0),
    }


def test_immediate_rewards_are_not_discounted_over_time():
    ppo = find_recipe("parity").trainer.ppo
    assert (ppo.gamma, ppo.gae_lambda, ppo.ent_coef) == (0.0, 0.0, 0.2)
