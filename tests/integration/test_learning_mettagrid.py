"""Slow: mettagrid games are learned, with memory where it is needed."""

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
def test_mettagrid_tmaze_is_learned_with_memory_and_evaluated_with_other_resources(tmp_path, capsys, policy, seed):
    run = trained(tmp_path, "mettagrid_tmaze", **{"seed": seed, "policy.name": policy})
    assert run.summary["eval/return_mean"] >= 0.95
    assert run.summary["eval/return_mean_memory_cleared"] <= 0.25
    capsys.readouterr()
    # Other resources change the numbering of features.
    args = ["eval", str(run.folder), "world.resources=ore,gem,wood", "--episodes", "400", "--json"]
    assert main(args) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["return_mean"] >= 0.95


def test_mettagrid_collect_is_learned(tmp_path):
    run = trained(tmp_path, "mettagrid_collect")
    assert run.summary["eval/return_mean"] >= 3.5
