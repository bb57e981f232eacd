"""Alarms about learning."""

import json
from dataclasses import replace

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


RECALL, PENDULUM = (holdfast.make_world(name, agents=1).spec for name in ("recall", "gym:Pendulum-v1"))


def alarms_of(change, spec=PENDULUM, **keys):
    """The kinds of alarms with their first iteration and text, of a run whose metrics `change(iteration)` gives."""
    config = override(find_recipe("general"), KEYS | keys)
    alarms, raised = LearningAlarms(config, spec), {}
    for iteration in range(1, ITERATIONS + 1):
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


def stuck(**metrics):
    """The change of a run whose return does not rise."""
    return lambda iteration: {"charts/episodic_return": -500.0, **metrics}


OFF = {"policy.normalize_obs": False, "trainer.normalize_reward": False}
VALUES_OFF = {"policy.normalize_obs": True, "trainer.normalize_reward": False}
ON = {"policy.normalize_obs": True, "trainer.normalize_reward": True}
FIXES = [
    (OFF, "type policy.normalize_obs=true trainer.normalize_reward=true."),
    # On Acrobot the memory saturates because of the values, whether observations are normalized or not.
    (VALUES_OFF, "type trainer.normalize_reward=true."),
    (ON, "type trainer.optimizer.learning_rate=0.00"),
]


@pytest.mark.parametrize(("keys", "fix"), FIXES)
def test_saturation_is_named_after_five_iterations(keys, fix):
    def change(iteration):
        return {"memory/saturation": 0.65 if iteration > 3 else 0.1, "charts/episodic_return": -500.0}

    iteration, text = alarms_of(change, **keys)["saturation"]
    assert iteration == 3 + PATIENCE
    assert text.startswith("65 % of the hidden state is saturated, since iteration 4; below 50 % is healthy.")
    assert fix in text
    now_and_then = alarms_of(lambda iteration: {"memory/saturation": 0.65 if iteration % PATIENCE else 0.1})
    assert now_and_then == {}
    # Before any episode has ended.
    raised = alarms_of(lambda iteration: {"memory/saturation": 0.65, "charts/episodic_return": None})
    assert raised["saturation"][0] == PATIENCE


def test_a_memory_that_is_used_may_saturate():
    # repeat_first: the first symbol must be held for 90 steps. Its return rises.
    assert alarms_of(lambda iteration: {"memory/saturation": 0.55 if iteration > 30 else 0.1}) == {}


@pytest.mark.parametrize(("keys", "fix"), FIXES)
def test_a_value_loss_that_explodes_is_named(keys, fix):
    iteration, text = alarms_of(stuck(**{"losses/value_loss": 2600.0}), **keys)["value loss"]
    assert iteration == PATIENCE
    assert "the value loss is 2,600, since iteration 1" in text
    assert fix in text


@pytest.mark.parametrize(("spec", "collapsed", "low"), [(RECALL, 0.001, 0.02), (PENDULUM, -3.7, -3.5)])
def test_entropy_that_collapses_without_success_is_named(spec, collapsed, low):
    def change(entropy):
        return lambda iteration: stuck(**{"losses/entropy": 1.0 if iteration < 10 else entropy})(iteration)

    iteration, text = alarms_of(change(collapsed), spec)["entropy"]
    assert iteration == 10 + PATIENCE - 1
    assert f"the entropy fell from 1 to {collapsed:g} nats, since iteration 10, and the return has not risen" in text
    assert "trainer.ppo.ent_coef=0.0" in text
    assert "entropy" not in alarms_of(change(low), spec)
    # A policy that has learned may be sure of its actions.
    assert alarms_of(lambda iteration: {"losses/entropy": 1.0 if iteration < 10 else collapsed}, spec) == {}


def test_the_entropy_of_a_box_may_be_negative_from_the_start():
    assert "entropy" not in alarms_of(stuck(**{"losses/entropy": -2.0}))


def test_a_return_that_does_not_rise_is_named_at_half_of_the_run():
    raised = alarms_of(stuck(**{"losses/explained_variance": 0.001}), **OFF)
    assert raised["return"][0] == ITERATIONS // 2
    assert "-500 in the first iterations, -500 at iteration 50 of 100" in raised["return"][1]
    assert "policy.normalize_obs=true trainer.normalize_reward=true" in raised["return"][1]
    assert "values explain 0 % of the variance of returns, since iteration 1:" in raised["values"][1]
    assert "return" in alarms_of(lambda iteration: {"charts/episodic_return": -float(iteration)})
    # The best possible from the start.
    best = replace(PENDULUM, best_return=20.0)
    assert alarms_of(lambda iteration: {"charts/episodic_return": 20.0}, best) == {}


def test_a_box_is_told_of_noise_that_explores_further():
    text = "type trainer.action_noise=pink, or give it more steps"
    white = ON | {"trainer.action_noise": "white"}
    assert text in alarms_of(stuck(), **white)["return"][1]
    assert "type trainer.ppo.ent_coef=0.01, or" in alarms_of(stuck(), RECALL, **white)["return"][1]
    assert "type trainer.ppo.ent_coef=0.01, or" in alarms_of(stuck(), **ON)["return"][1]


def test_a_run_without_ends_is_named():
    steps = override(find_recipe("general"), KEYS).rollout_length
    raised = alarms_of(lambda iteration: {"charts/episodes": 0, "charts/episodic_return": None})
    iteration, text = raised["episodes"]
    assert (iteration - 1) * steps < STEPS_WITHOUT_END <= iteration * steps
    assert "TimeLimit(max_episode_steps=1000)" in text
    assert set(raised) == {"episodes"}
    assert alarms_of(lambda iteration: {"charts/episodes": iteration == 1}) == {}


SMALL = {
    "world.agents": 4,
    "trainer.batch_size": 32,
    "trainer.minibatch_size": 32,
    "trainer.bptt_horizon": 8,
    "report": "off",
    "trainer.eval_episodes": 2,
}


def test_a_resumed_run_knows_the_iterations_before(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("holdfast.report.alarms.SATURATION", -1.0)
    keys = SMALL | {"schedule": "none", "runs_dir": str(tmp_path), "run": "x"}
    folder = holdfast.train("recall", {**keys, "trainer.total_timesteps": 96}).folder
    assert "ALARM" not in capsys.readouterr().out
    holdfast.train(resume=folder, config={"trainer.total_timesteps": 192})
    assert "is saturated, since iteration 1;" in capsys.readouterr().out


ACROBOT = {
    "world": "gym:Acrobot-v1",
    "policy.normalize_obs": False,
    "trainer.normalize_reward": False,
    "report": "off",
    "trainer.eval_episodes": 1,
    "trainer.eval_max_steps": 1,
    "trainer.check": "off",
    "trainer.monitor": "off",
    "trainer.checkpoint_interval": 100,
}


@pytest.mark.usefixtures("annotations_asleep")
def test_acrobot_without_normalization_raises_an_alarm_in_the_first_ten_updates(tmp_path, capsys):
    # Values are near -100: learning them saturates the memory, and nothing else is learned. Seven show it.
    batch = find_recipe("general").trainer.batch_size
    keys = ACROBOT | {"trainer.total_timesteps": 7 * batch, "runs_dir": str(tmp_path)}
    holdfast.train("general", keys)
    assert "of the hidden state is saturated, since iteration" in capsys.readouterr().out


def test_alarms_reach_the_console_of_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("holdfast.report.alarms.SATURATION", -1.0)
    keys = SMALL | {"trainer.total_timesteps": 320, "runs_dir": str(tmp_path), "run": "x"}
    run = holdfast.train("recall", keys)
    assert capsys.readouterr().out.count("ALARM: ") == 1
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    assert "memory/saturation" in json.loads(lines[0])
