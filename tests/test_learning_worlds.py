"""Slow: every world's recipe learns it by remembering, and values become what they must be."""

import pytest
import torch

import holdfast
from holdfast.config import change
from holdfast.experience import as_batch
from holdfast.recipes import find_recipe
from holdfast.train import build_world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]


def learn(folder, recipe, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    run = holdfast.train(recipe, {"run": "x", "runs_dir": str(folder), **keys})
    intact, cleared = (run.metrics[f"eval/return_mean{which}"] for which in ("", "_memory_cleared"))
    low, high = run.spec.best_return_without_memory, run.spec.best_return
    return (intact - low) / (high - low), (cleared - low) / (high - low)


@pytest.mark.parametrize("recipe", ["repeat_first", "n_back", "tmaze", "ragged", "parity"])
def test_a_world_is_learnt_by_remembering(tmp_path, recipe):
    """At least 95 % of the distance from the best without memory to the best; cleared, nothing of it."""
    intact, cleared = learn(tmp_path, recipe)
    assert intact >= 0.95
    assert cleared <= 0.08


def test_several_values_are_remembered_at_once(tmp_path):
    intact, cleared = learn(tmp_path, "key_value")
    assert intact >= 0.85
    assert cleared <= 0.08


# Half of the arms, a quarter of the time.
SMALL_FORAGE = {"world__arms": 2, "trainer__total_timesteps": 100_000}


def test_a_goal_is_remembered_over_trials(tmp_path):
    intact, cleared = learn(tmp_path, "forage", **SMALL_FORAGE)
    assert intact >= 0.95
    assert cleared <= 0.08


def test_a_goal_is_not_remembered_if_trials_clear(tmp_path):
    intact, _ = learn(tmp_path, "forage", memory__clear_on="trial", **SMALL_FORAGE)
    assert -0.2 <= intact <= 0.08


def values_of(policy, world):
    """What a policy thinks every step of an episode is worth."""
    policy.store.open({0: world.agents})
    step, values = world.reset(), []
    for _ in range(world.length):
        with torch.no_grad():
            values.append(policy(as_batch(step, 0, torch.zeros(world.agents)))["values"])
        step = world.step(torch.zeros(world.agents, dtype=torch.long))
    return torch.stack(values, dim=1)


@pytest.mark.parametrize("truncate", [False, True])
def test_values_become_what_they_must_be(tmp_path, truncate):
    keys = {"world.truncate": truncate}
    run = holdfast.train("constant", {**keys, "run": "x", "runs_dir": str(tmp_path)})
    config = change(find_recipe("constant"), keys)
    world = build_world(config, torch.device("cpu"), agents=2, seed=1)
    gamma = config.trainer.ppo.gamma
    right = torch.tensor([world.value(gamma, elapsed) for elapsed in range(world.length)])
    assert float(right.min()) == (pytest.approx(1 / (1 - gamma)) if truncate else 1.0)
    error = (values_of(run.policy, world) / right - 1).abs()
    assert float(error.max()) <= 0.02
