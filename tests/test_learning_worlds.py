"""Slow: every world's recipe learns it by remembering, and values become what they must be."""

import pytest
import torch

import holdfast
from holdfast.build import build_world
from holdfast.config import change
from holdfast.experience import as_batch
from holdfast.recipes import find_recipe
from lived import anything, live, returns_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]


def learn(folder, recipe, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    run = holdfast.train(recipe, {"run": "x", "runs_dir": str(folder), **keys})
    intact, cleared = (run.metrics[f"eval/return_mean{which}"] for which in ("", "_memory_cleared"))
    low, high = run.spec.best_return_without_memory, run.spec.best_return
    return (intact - low) / (high - low), (cleared - low) / (high - low)


@pytest.mark.parametrize("recipe", ["repeat_first", "n_back", "tmaze", "ragged"])
def test_a_world_is_learnt_by_remembering(tmp_path, recipe):
    """At least 95 % of the distance from the best without memory to the best; cleared, nothing of it."""
    intact, cleared = learn(tmp_path, recipe)
    assert intact >= 0.95
    assert cleared <= 0.08


def test_a_bit_is_flipped(tmp_path):
    intact, cleared = learn(tmp_path, "parity")
    assert intact >= 0.85
    assert cleared <= 0.08


def test_several_values_are_remembered_at_once(tmp_path):
    intact, cleared = learn(tmp_path, "key_value", trainer__total_timesteps=120_000)
    # Who remembers one of two keys gets half of the way.
    assert intact >= 0.7
    assert cleared <= 0.08


def test_a_goal_is_remembered_over_trials(tmp_path):
    intact, cleared = learn(tmp_path, "forage", world__reach=1, trainer__total_timesteps=200_000)
    assert intact >= 0.95
    assert cleared <= 0.08


def test_a_goal_is_not_remembered_if_trials_clear(tmp_path):
    keys = {"memory__clear_on": "trial", "world__reach": 1, "trainer__total_timesteps": 50_000}
    intact, _ = learn(tmp_path, "forage", **keys)
    assert -0.1 <= intact <= 0.08


def lived_by(policy, world, steps):
    """Let a policy act by chance; return what it was told, and what it thought that was worth."""
    policy.store.open({0: world.agents})
    agents, told, values = torch.arange(world.agents), [world.reset()], []
    for t in range(steps):
        with torch.no_grad():
            td = policy(as_batch(told[-1], 0, policy.actions.uniform(0, agents, t)))
        told.append(world.step(td["actions"]))
        values.append(td["values"])
    return told, torch.stack(values, dim=1)


def trained(folder, recipe, agents, **keys):
    """Train, and build a world that the training never saw."""
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    run = holdfast.train(recipe, {"run": "x", "runs_dir": str(folder), "trainer.eval_episodes": 1, **keys})
    config = change(find_recipe(recipe), keys)
    return run.policy, build_world(config, torch.device("cpu"), agents=agents, seed=-1), config


def test_a_crowd_learns_to_gather(tmp_path):
    keys = {"world__size": 20, "world__length": 60, "trainer__total_timesteps": 300_000}
    policy, world, _ = trained(tmp_path, "arena", 240, **keys)
    gathers, chance = (
        float(returns_of(told, each=2).mean())
        for told in (lived_by(policy, world, 120)[0], live(world, 120, anything(world)))
    )
    assert 1.5 * chance < gathers < world.return_at_most(2)


@pytest.mark.parametrize("truncate", [False, True])
def test_values_become_what_they_must_be(tmp_path, truncate):
    policy, world, config = trained(tmp_path, "constant", 2, world__truncate=truncate)
    gamma = config.trainer.ppo.gamma
    right = torch.tensor([world.value(gamma, elapsed) for elapsed in range(world.length)])
    assert float(right.min()) == (pytest.approx(1 / (1 - gamma)) if truncate else 1.0)
    _, values = lived_by(policy, world, world.length)
    assert float((values / right - 1).abs().max()) <= 0.02
