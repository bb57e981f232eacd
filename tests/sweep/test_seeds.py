"""Several seeds: how many run at a time, their lines, scores and report."""

import json
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from holdfast.config.run import override
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.sweep import seeds
from holdfast.sweep.seed_results import CPU, GPU, SeedsPlan, read_plan, results_table, scores_line, write_results

CONFIG = override(find_recipe("recall"), {"device": "cpu"})
PLAN = SeedsPlan(["recall", "seed=1"], [0, 1, 2, 3, 4], CPU)


def result(score, **changes):
    fields = {"finished": True, "return": score, "return_memory_cleared": 0.25, CPU: 12.0, "error": ""}
    fields |= {"training_return": 0.5, "steps": 5000}
    return fields | changes


RESULTS = {seed: result(score) for seed, score in enumerate((0.0, 1.0, 1.0, 1.0, 0.5))}


@pytest.mark.parametrize(
    ("keys", "slots"), [({}, 8), ({"threads": 3}, 2), ({"trainer.num_workers": 3}, 2), ({"threads": 0}, 1)]
)
def test_on_cpus_as_many_run_at_a_time_as_cores_allow(keys, slots, monkeypatch):
    monkeypatch.setattr(seeds.psutil.Process, "cpu_affinity", lambda self: list(range(8)), raising=False)
    assert seeds._slots(override(CONFIG, keys), CPU) == [{}] * slots


def test_on_gpus_one_runs_on_each(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert seeds._slots(CONFIG, GPU) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    assert seeds._slots(CONFIG, GPU) == [{"CUDA_VISIBLE_DEVICES": "5"}]


def test_the_interquartile_mean_leaves_out_the_lowest_and_highest(tmp_path):
    assert scores_line(RESULTS).startswith("interquartile mean of 5 seeds 0.833, 95 % interval 0.")
    assert scores_line({0: result(0.5)}) == "interquartile mean of 1 seed 0.500"
    assert scores_line({0: result(0.5, finished=False)}).startswith("no seed has a return")
    write_results(tmp_path, PLAN, RESULTS)
    assert read_plan(tmp_path) == (PLAN, RESULTS)
    values = json.loads((tmp_path / "seeds.json").read_text())
    assert values["return_iqm"] == pytest.approx(2.5 / 3)
    assert values["return_iqm_ci95"][0] < values["return_iqm"] < values["return_iqm_ci95"][1]


def test_the_table_has_every_seed_and_names_what_failed():
    out = Console(width=100, record=True)
    out.print(results_table(PLAN, {0: RESULTS[0], 1: result(None, finished=False, error="was killed by SIGKILL")}))
    lines = [line.split() for line in out.export_text().splitlines()]
    assert lines[1] == ["0", "0.000", "0.250", "5,000", "12.0"]
    assert lines[2][-1] == "SIGKILL"
    assert lines[5] == ["4", "0.0", "not", "trained"]


def test_a_damaged_file_is_named(tmp_path):
    for text in ("", "[]", "{}", '{"arguments": [], "seeds": ["x"], "unit": "", "results": {}}'):
        (tmp_path / "seeds.json").write_text(text)
        with pytest.raises(ConfigError, match=r"seeds\.json is damaged"):
            read_plan(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": [1]},
        {"seeds": [0, 0]},
        {"seeds": [-1]},
        {"seeds": ["0"]},
        {"unit": "euros"},
        {"results": {"0": {}}},
        {"results": {"0": {**RESULTS[0], "finished": 1}}},
        {"results": {"0": {**RESULTS[0], "return": "9"}}},
        {"results": {"0": {**RESULTS[0], "return": float("nan")}}},
        {"results": {"0": {**RESULTS[0], "error": None}}},
    ],
)
def test_values_that_no_run_writes_are_refused(change, tmp_path):
    write_results(tmp_path, PLAN, RESULTS)
    assert read_plan(tmp_path) == (PLAN, RESULTS)
    values = json.loads((tmp_path / "seeds.json").read_text())
    (tmp_path / "seeds.json").write_text(json.dumps(values | change))
    with pytest.raises(ConfigError, match=r"seeds\.json is damaged"):
        read_plan(tmp_path)


def test_the_report_is_of_the_finished_seeds(tmp_path, monkeypatch):
    reports = []
    monkeypatch.setattr(seeds, "write_report", lambda runs, target: reports.append((runs, target)) or target)
    results = RESULTS | {1: result(None, finished=False)}
    seeds._write_report(tmp_path, PLAN, results, Console(quiet=True))
    assert reports == [([tmp_path / f"seed{seed}" for seed in (0, 2, 3, 4)], tmp_path / "report.html")]


def test_a_report_of_many_seeds_is_of_the_first(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(seeds, "write_report", lambda runs, target: sizes.append(len(runs)) or target)
    plan = SeedsPlan(["recall"], list(range(25)), CPU)
    seeds._write_report(tmp_path, plan, {seed: result(1.0) for seed in plan.seeds}, Console(file=StringIO()))
    assert sizes == [20]


@pytest.mark.parametrize("terminal", [True, False])
def test_each_seed_has_a_line(terminal, tmp_path):
    runs = [seeds.SeedRun(seed, tmp_path / f"seed{seed}") for seed in range(2)]
    runs[0].folder.mkdir()
    (runs[0].folder / "metrics.jsonl").write_text('{"iteration": 3, "charts/episodic_return": 0.5}\n')
    runs[0].process = SimpleNamespace(poll=lambda: None)
    out = Console(file=StringIO(), force_terminal=terminal, width=100)
    results = {}
    with seeds._display(runs, results, CONFIG, out) as show:
        show()
        show()
        results[0] = result(0.75)
        show()
    text = out.file.getvalue()
    assert text.count("seed 0 · iteration 3 of 74 · return 0.500") == (2 if terminal else 1)
    assert "seed 0 · finished · return 0.750" in text
    assert ("seed 1 · waits" in text) == terminal


def test_the_newest_line_of_a_file_that_grows(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert seeds._newest(file) == {}
    file.write_text('{"iteration": 1}\n{"iteration": 2}\n{"itera')
    assert seeds._newest(file) == {"iteration": 2}
