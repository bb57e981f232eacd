"""`holdfast check trainer:...` and `rollout:...` from the command line."""

import json
import sys

import pytest

from holdfast.cli import main

pytestmark = pytest.mark.usefixtures("annotations_asleep")


def test_cleanrl_treats_a_truncation_as_a_termination(capsys):
    assert main(["check", "trainer:cleanrl", "--json"]) == 1
    results = json.loads(capsys.readouterr().out)
    assert [name for name, law in results["laws"].items() if not law["ok"]] == ["bootstrap"]
    finding = results["laws"]["bootstrap"]["finding"]
    assert "values after truncations: after env 1, step 0" in finding
    assert "hypothesis: treated as a termination, the bootstrap is 0" in finding


def test_a_function_of_ones_own(capsys):
    assert main(["check", "trainer:helpers.mini_trainer:train"]) == 0
    text = capsys.readouterr().out
    assert text.count("✓") == 9
    assert "24 steps, 2 updates" in text


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["trainer:cleanr"], "trainer:cleanr is not known; did you mean cleanrl?"),
        (["trainer:"], "trainer: is not known; choose one of sb3, cleanrl"),
        (["trainer:helpers.mini_trainer:trains"], "did you mean helpers.mini_trainer:train"),
        (["trainer:helpers.mini_trainer:T"], "trainer:helpers.mini_trainer:T is no function"),
        (["trainer:cleanrl", "--obs", "4"], "--obs is not for trainers"),
        (["trainer:cleanrl", "--html"], "--html is not for trainers"),
        (["trainer:cleanrl", "seed=1"], "seed is not an option here"),
        (["trainer:cleanrl", "--gamma", "2"], "--gamma 2: write a number from 0 to 1, for example 0.99."),
        (["trainer:cleanrl", "--lam", "x"], "--lam x: write a number"),
        (["trainer:cleanrl", "--interface", "sb3"], "trainer:cleanrl has its own interface, gym"),
        (["trainer:helpers.mini_trainer:train", "--interface", "jax"], "interface 'jax' is not known"),
        (["fast", "--gamma", "0.9"], "--gamma is for trainers"),
        (["rollout:nowhere.safetensors"], "nowhere.safetensors is no file; write rollout:FILE"),
        (["rollout:x", "--gamma", "0.9"], "--gamma is not for rollouts"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(capsys, words, error):
    assert main(["check", *words]) == 2
    printed = capsys.readouterr().err
    assert error in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["trainer:sb3"], "trainer:sb3: sb3_contrib is not installed; type: pip install sb3-contrib"),
        (
            ["trainer:helpers.mini_trainer:train", "--interface", "sb3"],
            "needs sb3-contrib; type: pip install sb3-contrib",
        ),
        (["trainer:helpers.mini_trainer:train", "--interface", "rsl_rl"], "needs rsl-rl-lib; type: pip install"),
    ],
)
def test_a_missing_package_is_named(capsys, monkeypatch, words, error):
    for module in ("sb3_contrib", "stable_baselines3", "rsl_rl"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "holdfast.check.trainers.sb3_trainer", raising=False)
    assert main(["check", *words]) == 2
    assert error in capsys.readouterr().err
