"""Slow: the default recipe learns to use memory, with exact replay throughout."""

import json
import re
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import holdfast
from holdfast.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]


@pytest.mark.parametrize("seed", range(2))
def test_default_recipe_learns_with_memory(tmp_path, capsys, seed):
    run = holdfast.train("recall", {"seed": seed, "run": "x", "runs_dir": str(tmp_path)})
    assert run.summary["eval/return_mean"] >= 0.95
    assert run.summary["eval/return_mean_memory_cleared"] <= 0.30
    capsys.readouterr()
    assert main(["eval", str(run.folder), "--episodes", "2000", "--memory", "all", "--json"]) == 0
    results = {result["memory"]: result for result in json.loads(capsys.readouterr().out)}
    assert results["intact"]["return_ci95"][0] >= 0.95
    assert results["cleared"]["return_mean"] <= 0.30
    assert results["shuffled"]["return_mean"] <= 0.35
    assert {result["episodes"] for result in results.values()} == {2000}
    assert {result["steps_trained"] for result in results.values()} == {run.summary["global_step"]}
    # Trained logits are sharper, so that rounding shows more: the exported model still agrees.
    assert seed or main(["export", str(run.folder), "--to", "onnx"]) == 0


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("component:latent_attn_tiny", 3e5),
        # It needs a sixth of the steps, each six times as long.
        ("example", 1e5),
    ],
)
def test_every_policy_learns_with_memory(tmp_path, policy, steps):
    keys = {"policy": policy, "trainer.total_timesteps": steps, "run": "x", "runs_dir": str(tmp_path)}
    run = holdfast.train("recall", keys)
    assert run.summary["eval/return_mean"] >= 0.95
    assert run.summary["eval/return_mean_memory_cleared"] <= 0.30


def test_largest_attention_policy_learns_with_memory(tmp_path):
    # Two cues and a short delay: each step takes three times as long as those of latent_attn_tiny.
    keys = {"world.delay": 2, "world.cues": 2, "policy.hidden_size": 64, "policy.num_layers": 1}
    keys |= {"policy": "latent_attn_med", "trainer.total_timesteps": 3e4, "report": "off", "trainer.eval_episodes": 500}
    run = holdfast.train("recall", {**keys, "run": "x", "runs_dir": str(tmp_path)})
    assert run.summary["eval/return_mean"] >= 0.95
    assert run.summary["eval/return_mean_memory_cleared"] <= 0.6


@pytest.mark.parametrize("truncate", [False, True])
def test_replay_is_exact_over_a_complete_run(tmp_path, truncate):
    keys = {"world.delay": "4..24", "world.truncate": truncate, "trainer.total_timesteps": 2e5}
    run = holdfast.train("recall", {**keys, "run": "x", "runs_dir": str(tmp_path)})
    *lines, _ = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) > 45
    assert max(line["memory/replay_error"] for line in lines) <= 1e-5
    assert max(line["memory/replay_value_error"] for line in lines) <= 1e-5
    assert holdfast.check(run.policy, holdfast.make_world("recall", agents=8)).ok


def test_inductor_compiles_the_policy(tmp_path):
    world = holdfast.make_world("recall", agents=8)
    policy, compiled = (holdfast.make_policy("fast", world, seed=0) for _ in range(2))
    compiled.compile_parts(backend="inductor")
    obs = torch.stack([world.reset().obs] + [world.step(torch.zeros(8, dtype=torch.long)).obs for _ in range(11)], 1)
    td = TensorDict({"env_obs": obs, "first": torch.rand(8, 12) < 0.2}, batch_size=[8, 12])
    actions = torch.randint(4, (8, 12))
    outputs = []
    for model in (policy, compiled):
        out = model(td.clone(), state=model.lstm.cell.initial(8), action=actions)
        (out["act_log_prob"].sum() + out["values"].sum()).backward()
        outputs.append(out)
    for key in ("act_log_prob", "values"):
        torch.testing.assert_close(outputs[1][key], outputs[0][key], atol=1e-5, rtol=0)
    largest = max(a.grad.abs().max() for a in policy.parameters())
    for a, b in zip(policy.parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 2e-5 * largest


def test_compiled_training_gives_the_same_weights(tmp_path):
    keys = {
        "run": "x",
        "runs_dir": str(tmp_path),
        "trainer.total_timesteps": 8192,
        "report": "off",
        "trainer.eval_episodes": 200,
    }
    eager = holdfast.train("recall", keys)
    compiled = holdfast.train("recall", {**keys, "policy.compile": True})
    for name, weight in eager.policy.named_parameters():
        # A softmax is invariant to a common bias: its gradient is rounding, which Adam amplifies.
        if name != "actor.scores.bias":
            other = compiled.policy.get_parameter(name)
            torch.testing.assert_close(weight, other, atol=1e-3, rtol=1e-2)


def test_policy_of_the_readme_learns_to_remember(tmp_path, monkeypatch):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", readme, re.S) if "class Mine" in text)
    (tmp_path / "mine_of_the_readme.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    keys = {"policy": "mine_of_the_readme:Mine", "policy.memory": "gru", "run": "x", "runs_dir": str(tmp_path)}
    run = holdfast.train("recall", keys)
    assert run.summary["eval/return_mean"] >= 0.95
    assert run.summary["eval/return_mean_memory_cleared"] <= 0.30
