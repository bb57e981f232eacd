"""Runs in worlds of other packages: replay matches the rollout, and every episode end clears once."""

import json

import pytest

import holdfast
from holdfast.errors import HoldfastError
from holdfast.report.metrics import METRICS

KEYS = {
    "policy": "fast",
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 96,
    "trainer.minibatch_size": 48,
    "report": "off",
    "trainer.eval_episodes": 6,
    "runs_dir": "runs",
}
SHORT = {"world": "envpool:CartPole-v1", "world.agents": 12, "world.options": {"max_episode_steps": 9}}
WORLDS = {
    "pettingzoo": {"world": "pettingzoo:helpers.pettingzoo_envs:Guests", "world.agents": 6},
    "envpool": SHORT,
    "envpool async": {**SHORT, "world.vector": "async", "world.batch": 4},
}
# envpool is installed where slow tests run: it is big.
ENVPOOL = [pytest.param(name, marks=pytest.mark.slow) for name in WORLDS if name.startswith("envpool")]


def lines_of(run):
    clocks = {name for name, metric in METRICS.items() if metric.kind == "time"}
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in clocks} for line in lines]


def needs(world):
    pytest.importorskip(WORLDS[world]["world"].partition(":")[0])


@pytest.mark.parametrize("world", ["pettingzoo", *ENVPOOL])
def test_replay_matches_rollout_and_every_end_clears_once(tmp_path, world):
    needs(world)
    keys = {**KEYS, **WORLDS[world], "runs_dir": str(tmp_path), "trainer.total_timesteps": 480}
    *updates, _ = lines_of(holdfast.train("general", {**keys, "run": "x"}))
    assert len(updates) >= 5
    # The first iteration only fills the statistics of normalization.
    assert all(line["memory/replay_error"] <= 1e-5 for line in updates[1:])
    assert all(line["memory/resets"] == line["memory/resets_due"] for line in updates)
    assert sum(line["memory/resets"] for line in updates) > 20
    assert sum(line["charts/episodes"] for line in updates) > 20


@pytest.mark.slow
def test_async_envpool_run_equals_sync_run(tmp_path):
    """Batches of the policy differ, so numbers may differ in their last digits."""
    needs("envpool")
    keys = {**KEYS, "runs_dir": str(tmp_path), "trainer.total_timesteps": 192}
    results = []
    for world in ("envpool", "envpool async"):
        *updates, _ = lines_of(holdfast.train("general", {**keys, **WORLDS[world], "run": world.replace(" ", "_")}))
        results.append([[line[key] for key in ("global_step", "charts/episodes")] for line in updates])
        results[-1] += [pytest.approx(updates[-1]["losses/value_loss"], rel=1e-4)]
    assert results[0] == results[1]


@pytest.mark.parametrize("world", ENVPOOL)
def test_resumed_envpool_run_starts_new_episodes_and_logs_it(tmp_path, world, capsys):
    needs(world)
    keys = {**KEYS, **WORLDS[world], "runs_dir": str(tmp_path), "run": "x"}
    run = holdfast.train("general", {**keys, "trainer.total_timesteps": 96})
    resumed = holdfast.train(None, {"trainer.total_timesteps": 192}, resume=run.folder)
    assert "envpool:CartPole-v1 cannot save the state of its environments" in capsys.readouterr().out
    assert lines_of(resumed)[-1]["global_step"] > 96


def test_pettingzoo_metrics_do_not_depend_on_the_number_of_workers(tmp_path):
    keys = {**KEYS, **WORLDS["pettingzoo"], "world.agents": 12, "runs_dir": str(tmp_path)}
    keys |= {"trainer.total_timesteps": 192, "trainer.batch_size": 96, "trainer.async_factor": 2}
    one, two = (lines_of(holdfast.train("general", {**keys, "trainer.num_workers": n, "run": f"x{n}"})) for n in (1, 2))
    assert one == two
    assert sum(line.get("charts/episodes", 0) for line in one) > 10


@pytest.mark.slow
def test_envpool_rejects_workers(tmp_path):
    needs("envpool")
    keys = {**KEYS, **WORLDS["envpool"], "runs_dir": str(tmp_path), "trainer.num_workers": 2}
    with pytest.raises(HoldfastError, match="has its own threads"):
        holdfast.train("general", {**keys, "trainer.total_timesteps": 96})
