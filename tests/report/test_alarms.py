"""Alarms about learning."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.config.run import override
from holdfast.recipes import find_recipe
from holdfast.report.alarms import PATIENCE, SATURATION, STEPS_WITHOUT_END, LearningAlarms

ITERATIONS = 100
KEYS = {"trainer.total_timesteps": ITERATIONS * find_recipe("general").trainer.batch_size}
HEALTHY = {
    "charts/episodes": 10,
    "memory/saturation": 0.2,
    "losses/value_loss": 0.5,
    "losses/entropy": 1.0,
    "losses/explained_variance": 0.7,
}


def alarms_of(change, count=ITERATIONS, best=None, first_iteration=0, **keys):
    """The kinds of alarms with their first iteration and text, of a run whose metrics `change(iteration)` gives."""
    config = override(find_recipe("general"), KEYS | keys)
    alarms, raised = LearningAlarms(config, best, first_iteration), {}
    for iteration in range(first_iteration + 1, first_iteration + count + 1):
        metrics = {"iteration": iteration, "charts/episodic_return": float(iteration), **HEALTHY, **change(iteration)}
        for kind, text in alarms.check({name: number for name, number in metrics.items() if number is not None}):
            raised.setdefault(kind, (iteration, text))
    return raised


@settings(max_examples=30, deadline=None)
@given(st.floats(0, SATURATION), st.floats(0, 100), st.floats(0.05, 1), st.floats(-1000, 1000), st.floats(1e-6, 1))
def test_a_healthy_run_raises_none(saturation, value_loss, explained, start, entropy):
    def change(iteration):
        return {
            "memory/saturation": saturation,
            "losses/value_loss": value_loss,
            "losses/explained_variance": explained,
            "losses/entropy": entropy,
            "charts/episodic_return": start + abs(start) * iteration / ITERATIONS + iteration,
        }

    assert alarms_of(change) == {}


OFF = {"policy.normalize_obs": False, "policy.normalize_value": False}
ON = {"policy.normalize_obs": True, "policy.normalize_value": True}


@pytest.mark.parametrize(("keys", "fix"), [(OFF, "type policy.normalize_obs=true"), (ON, "learning_rate=0.00")])
def test_saturation_is_named_after_five_iterations(keys, fix):
    raised = alarms_of(lambda iteration: {"memory/saturation": 0.65 if iteration > 3 else 0.1}, **keys)
    iteration, text = raised["saturation"]
    assert iteration == 3 + PATIENCE
    assert text.startswith("65 % of the hidden state is saturated, since iteration 4; below 50 % is healthy.")
    assert fix in text
    assert alarms_of(lambda iteration: {"memory/saturation": 0.65 if iteration % PATIENCE else 0.1}) == {}


@pytest.mark.parametrize(("keys", "fix"), [(OFF, "type policy.normalize_value=true"), (ON, "learning_rate=0.00")])
def test_a_value_loss_that_explodes_is_named(keys, fix):
    iteration, text = alarms_of(lambda iteration: {"losses/value_loss": 2600.0}, **keys)["value loss"]
    assert iteration == PATIENCE
    assert "the value loss is 2,600, since iteration 1" in text
    assert fix in text


def test_entropy_that_collapses_without_success_is_named():
    def change(iteration):
        return {"losses/entropy": 1.0 if iteration < 10 else 0.001, "charts/episodic_return": -500.0}

    iteration, text = alarms_of(change)["entropy"]
    assert iteration == 10
    assert "the entropy fell from 1 to 0.001 nats, and the return has not risen" in text
    assert "trainer.ppo.ent_coef=0.0" in text
    # A policy that has learned may be sure of its actions.
    assert "entropy" not in alarms_of(lambda iteration: {"losses/entropy": 1.0 if iteration < 10 else 0.001})


def test_a_return_that_does_not_rise_is_named_at_half_of_the_run():
    def stuck(iteration):
        return {"charts/episodic_return": -500.0, "losses/explained_variance": 0.001}

    raised = alarms_of(stuck, **OFF)
    assert raised["return"][0] == ITERATIONS // 2
    assert "-500 in the first iterations, -500 at iteration 50 of 100" in raised["return"][1]
    assert "policy.normalize_obs=true policy.normalize_value=true" in raised["return"][1]
    assert "values explain 0 % of the variance" in raised["values"][1]
    assert "return" in alarms_of(lambda iteration: {"charts/episodic_return": -float(iteration)})
    # The best possible from the start.
    assert alarms_of(lambda iteration: {"charts/episodic_return": 20.0}, best=20.0) == {}


def test_a_run_without_ends_is_named():
    steps = override(find_recipe("general"), KEYS).rollout_length
    raised = alarms_of(lambda iteration: {"charts/episodes": 0, "charts/episodic_return": None})
    iteration, text = raised["episodes"]
    assert (iteration - 1) * steps < STEPS_WITHOUT_END <= iteration * steps
    assert "TimeLimit(max_episode_steps=1000)" in text
    assert set(raised) == {"episodes"}
    assert alarms_of(lambda iteration: {"charts/episodes": iteration == 1}) == {}


def test_a_resumed_run_is_not_blamed_for_what_it_has_not_seen():
    raised = alarms_of(lambda iteration: {"charts/episodic_return": -500.0}, count=10, first_iteration=80)
    assert raised == {}


def test_alarms_reach_the_console_of_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("holdfast.report.alarms.SATURATION", -1.0)
    keys = {"world.agents": 4, "trainer.batch_size": 32, "trainer.minibatch_size": 32, "trainer.bptt_horizon": 8}
    keys |= {"trainer.total_timesteps": 320, "trainer.eval_episodes": 2, "runs_dir": str(tmp_path), "run": "x"}
    run = holdfast.train("recall", keys)
    assert capsys.readouterr().out.count("ALARM: ") == 1
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert "memory/saturation" in json.loads(lines[0])
