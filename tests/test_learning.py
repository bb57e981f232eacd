"""Slow: the default recipe learns to remember, and its memory is replayed as it was lived."""

import json

import pytest
import torch
from tensordict import TensorDict

import holdfast
from holdfast.cli import main
from small import OnlySpec, make_small

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]


@pytest.mark.parametrize("seed", range(5))
def test_the_default_recipe_learns_to_remember(tmp_path, capsys, seed):
    run = holdfast.train("recall", {"seed": seed, "run": "x", "runs_dir": str(tmp_path)})
    assert run.metrics["eval/return_mean"] >= 0.95
    assert run.metrics["eval/return_mean_memory_cleared"] <= 0.30
    capsys.readouterr()
    assert main(["eval", str(run.folder), "--episodes", "2000", "--memory", "all", "--json"]) == 0
    found = {each["memory"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["intact"]["return_ci95"][0] >= 0.95
    assert found["cleared"]["return_mean"] <= 0.30
    assert found["shuffled"]["return_mean"] <= 0.35
    assert {each["episodes"] for each in found.values()} == {2000}
    assert {each["steps_trained"] for each in found.values()} == {run.metrics["global_step"]}
    # What is sharp makes more of the last digit than what was never trained: the file thinks the same.
    assert seed or main(["export", str(run.folder), "--to", "onnx"]) == 0


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("latent_attn_tiny", 3e5),
        ("component:latent_attn_small", 3e5),
        # It needs a sixth of the steps, each six times as long.
        ("example", 1e5),
    ],
)
def test_every_policy_learns_to_remember(tmp_path, policy, steps):
    keys = {"policy": policy, "trainer.total_timesteps": steps, "run": "x", "runs_dir": str(tmp_path)}
    run = holdfast.train("recall", keys)
    assert run.metrics["eval/return_mean"] >= 0.95
    assert run.metrics["eval/return_mean_memory_cleared"] <= 0.30


@pytest.mark.parametrize("truncate", [False, True])
def test_replay_is_exact_over_a_whole_run_with_starts_anywhere(tmp_path, truncate):
    keys = {"world.delay": "4..24", "world.truncate": truncate, "trainer.total_timesteps": 4e5}
    run = holdfast.train("recall", {**keys, "run": "x", "runs_dir": str(tmp_path)})
    *lines, _ = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) > 90
    assert max(line["memory/replay_error"] for line in lines) <= 1e-5
    assert max(line["memory/replay_value_error"] for line in lines) <= 1e-5
    assert holdfast.check(run.policy, holdfast.make_world("recall", agents=8)).ok


def test_inductor_compiles_the_parts(tmp_path):
    world = holdfast.make_world("recall", agents=8)
    policy, compiled = (holdfast.make_policy("fast", world, seed=0) for _ in range(2))
    compiled.compile_parts(backend="inductor")
    obs = torch.stack(
        [world.reset().obs] + [world.step(torch.zeros(8, dtype=torch.long)).obs for _ in range(11)], 1
    )
    td = TensorDict({"env_obs": obs, "first": torch.rand(8, 12) < 0.2}, batch_size=[8, 12])
    actions = torch.randint(4, (8, 12))
    outputs = []
    for each in (policy, compiled):
        out = each(td.clone(), state=each.lstm.cell.initial(8), action=actions)
        (out["act_log_prob"].sum() + out["values"].sum()).backward()
        outputs.append(out)
    for key in ("act_log_prob", "values"):
        torch.testing.assert_close(outputs[1][key], outputs[0][key], atol=1e-5, rtol=0)
    largest = max(a.grad.abs().max() for a in policy.parameters())
    for a, b in zip(policy.parameters(), compiled.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 2e-5 * largest


def test_a_policy_trained_with_compiled_parts_learns_the_same(tmp_path):
    keys = {
        "run": "x",
        "runs_dir": str(tmp_path),
        "trainer.total_timesteps": 8192,
        "trainer.eval_episodes": 200,
    }
    eager = holdfast.train("recall", keys)
    compiled = holdfast.train("recall", {**keys, "policy.compile": True})
    for name, weight in eager.policy.named_parameters():
        # A softmax does not feel one bias for all actions: its gradient is rounding, which Adam inflates.
        if name != "actor.scores.bias":
            other = compiled.policy.get_parameter(name)
            torch.testing.assert_close(weight, other, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("seed", range(5))
def test_correct_policies_raise_no_false_alarm(seed):
    laws = holdfast.check(make_small(seed=seed), OnlySpec())
    assert laws.ok, {name: law.finding for name, law in laws.items() if not law.ok}
