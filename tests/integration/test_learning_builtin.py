"""Slow: every built-in world is learned with memory, and values become exact."""

import pytest
import torch

import holdfast
from helpers.oracles import arena_return_at_most
from helpers.play_world import anything, live, returns_of
from holdfast.build import build_world
from holdfast.config.run import override
from holdfast.recipes import find_recipe
from holdfast.rollout import step_to_td

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]


def learn(folder, recipe, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    run = holdfast.train(recipe, {"run": "x", "runs_dir": str(folder), **keys})
    intact, cleared = (run.summary[f"eval/return_mean{which}"] for which in ("", "_memory_cleared"))
    low, high = run.spec.best_return_without_memory, run.spec.best_return
    return (intact - low) / (high - low), (cleared - low) / (high - low)


@pytest.mark.parametrize("recipe", ["repeat_first", "n_back", "tmaze", "ragged"])
def test_builtin_world_is_learned_with_memory(tmp_path, recipe):
    """At least 95 % of the distance from the best without memory to the best; cleared, nothing of it."""
    intact, cleared = learn(tmp_path, recipe)
    assert intact >= 0.95
    assert cleared <= 0.08


def test_parity_is_learned_with_memory(tmp_path):
    intact, cleared = learn(tmp_path, "parity")
    assert intact >= 0.85
    assert cleared <= 0.08


def test_key_value_is_learned_with_memory(tmp_path):
    intact, cleared = learn(tmp_path, "key_value", trainer__total_timesteps=120_000)
    # One remembered key of two gives half of the return.
    assert intact >= 0.7
    assert cleared <= 0.08


def test_forage_memory_survives_trials(tmp_path):
    intact, cleared = learn(tmp_path, "forage")
    assert intact >= 0.95
    assert cleared <= 0.08


def test_forage_is_not_learned_if_trials_clear_memory(tmp_path):
    keys = {"memory__clear_on": "trial", "world__reach": 1, "trainer__total_timesteps": 50_000}
    intact, _ = learn(tmp_path, "forage", **keys)
    assert -0.1 <= intact <= 0.08


def rollout(policy, world, steps):
    """Let a policy act with sampled actions; return the steps and its values."""
    policy.store.allocate({0: world.agents})
    agents, history, values = torch.arange(world.agents), [world.reset()], []
    for t in range(steps):
        with torch.no_grad():
            td = policy(step_to_td(history[-1], 0, policy.actions.draws_for(0, agents, t)))
        history.append(world.step(td["actions"]))
        values.append(td["values"])
    return history, torch.stack(values, dim=1)


def trained(folder, recipe, agents, **keys):
    """Train, and build a held-out world."""
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    run = holdfast.train(
        recipe, {"run": "x", "runs_dir": str(folder), "report": "off", "trainer.eval_episodes": 1, **keys}
    )
    config = override(find_recipe(recipe), keys)
    return run.policy, build_world(config, torch.device("cpu"), agents=agents, seed=-1), config


def test_arena_is_learned_above_chance(tmp_path):
    """A third of the recipe's steps, in its world; the first episode of each agent, which is shorter."""
    policy, world, config = trained(tmp_path, "arena", 96, trainer__total_timesteps=500_000)
    length = config.world.length
    gathers, chance = (
        float(returns_of(history, each=1).mean())
        for history in (rollout(policy, world, length)[0], live(world, length, anything(world)))
    )
    assert 1.8 * chance < gathers < arena_return_at_most(world, 1)


@pytest.mark.parametrize("truncate", [False, True])
def test_values_converge_to_the_exact_ones(tmp_path, truncate):
    policy, world, config = trained(tmp_path, "constant", 2, world__truncate=truncate)
    gamma = config.trainer.ppo.gamma
    left = world.length - torch.arange(world.length)
    right = torch.full([world.length], 1 / (1 - gamma)) if truncate else (1 - gamma**left) / (1 - gamma)
    assert float(right.min()) == pytest.approx(1 / (1 - gamma) if truncate else 1.0)
    _, values = rollout(policy, world, world.length)
    assert float((values / right - 1).abs().max()) <= 0.02
