"""Slow: games in the real engine of mettagrid are learnt, by remembering where that is needed."""

import json

import pytest

import holdfast
from holdfast.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("annotations_asleep")]
pytest.importorskip("mettagrid")


def trained(folder, recipe, **keys):
    run = holdfast.train(recipe, {"run": "x", "runs_dir": str(folder), **keys})
    *updates, _ = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(line["memory/replay_error"] for line in updates) <= 1e-5
    assert all(line["memory/resets"] == line["memory/resets_due"] for line in updates)
    assert sum(line["memory/resets"] for line in updates) > 0
    return run


@pytest.mark.parametrize(("policy", "seed"), [("fast", 0), ("latent_attn_small", 0)])
def test_the_maze_is_learnt_by_remembering_and_played_with_other_resources(tmp_path, capsys, policy, seed):
    run = trained(tmp_path, "mettagrid_tmaze", **{"seed": seed, "policy.name": policy})
    assert run.metrics["eval/return_mean"] >= 0.95
    assert run.metrics["eval/return_mean_memory_cleared"] <= 0.25
    capsys.readouterr()
    # With other resources the engine numbers its features otherwise.
    words = ["eval", str(run.folder), "world.resources=ore,gem,wood", "--episodes", "400", "--json"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["return_mean"] >= 0.95


def test_24_agents_learn_to_collect(tmp_path):
    run = trained(tmp_path, "mettagrid_collect")
    assert run.metrics["eval/return_mean"] >= 3.5
