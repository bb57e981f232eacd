"""Whole runs in worlds of other packages: replayed as they were lived, and cleared as often as they ended."""

import json

import pytest

import holdfast
from holdfast.report import METRICS

KEYS = {
    "policy": "fast",
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 96,
    "trainer.minibatch_size": 48,
    "trainer.eval_episodes": 6,
    "runs_dir": "runs",
}
WORLDS = {"pettingzoo": {"world": "pettingzoo:zoo_envs:Guests", "world.agents": 6}}


def lines_of(run):
    clocks = {name for name, metric in METRICS.items() if metric.kind == "time"}
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in clocks} for line in lines]


@pytest.mark.parametrize("world", WORLDS)
def test_what_is_replayed_is_what_was_lived_and_every_end_clears_once(tmp_path, world):
    keys = {**KEYS, **WORLDS[world], "runs_dir": str(tmp_path), "trainer.total_timesteps": 480}
    *updates, _ = lines_of(holdfast.train("general", {**keys, "run": "x"}))
    assert len(updates) == 5
    for line in updates:
        assert line["memory/replay_error"] <= 1e-5
        assert line["memory/resets"] == line["memory/resets_due"] > 0
    assert sum(line["charts/episodes"] for line in updates) > 20
