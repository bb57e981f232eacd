import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

from holdfast.cli import bench_loop, main

SMALL = [
    "recall",
    "world.agents=4",
    "trainer.batch_size=64",
    "trainer.minibatch_size=32",
    "trainer.bptt_horizon=8",
    "policy.hidden_size=8",
    "--iterations=4",
]


@pytest.mark.parametrize("what", ["train", "rollout", "update"])
def test_bench_of_the_loop_prints_and_writes_its_result(what, capsys, tmp_path):
    assert main(["bench", what, *SMALL, f"--json={tmp_path / 'result.json'}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "result.json").read_text())
    assert printed["measured"] == what
    assert printed["iterations"] == 3
    low, high = printed["spread"]
    assert 0 < low <= printed["steps_per_second"] <= high
    assert printed["minibatches"] == 2
    assert printed["replay_error"] < 1e-4
    if what == "update":
        assert printed["steps_per_second"] == pytest.approx(64 / (printed["milliseconds"]["update"] / 1e3), rel=0.5)


def test_bench_against_jax_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "train", *SMALL, "--against=jax"]) == 2
    assert "pip install" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert main(["bench", "train", *SMALL, "--against=jax"]) == 2
    assert "trainer.bptt_horizon=64 trainer.batch_size=256" in capsys.readouterr().err


def test_bench_against_jax_takes_its_faster_precision(capsys, monkeypatch):
    original, rates = subprocess.run, {"float32": 5.0, "bfloat16": 10.0}

    def run(command, **options):
        if bench_loop.RIVAL not in command[1]:
            return original(command, **options)
        return subprocess.CompletedProcess(command, 0, json.dumps({"steps_per_second": rates[command[-1]]}), "")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench_loop.subprocess, "run", run)
    keys = ["world.agents=2", "trainer.batch_size=128", "trainer.minibatch_size=64", "trainer.bptt_horizon=64"]
    sizes = ["recall", *keys, "policy.hidden_size=8", "--iterations=4", "--against=jax"]
    assert main(["bench", "train", *sizes]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["jax"] == {"steps_per_second": 5.0}
    assert result["ratio"] == result["steps_per_second"] / 5.0


def test_failed_rival_is_one_line(capsys, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no device")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(bench_loop.subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(bench_loop.ConfigError, match="the program failed: RuntimeError: no device"):
        bench_loop._run_rival(Path("x"), 1, 1, "float32")
