"""The examples of parts in other trainers run; `make slow` installs their libraries."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = {
    "cleanrl_ppo_lstm.py": ((), ["2"], "update 2: "),
    "rsl_rl_training.py": (("rsl_rl", "git"), ["2"], "mean reward of a step: "),
    "sb3_to_onnx.py": (("sb3_contrib", "onnxruntime"), ["2048"], "mean return from ONNX: "),
    "skrl_compute.py": (("skrl",), ["256"], "mean return of the last episodes: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_example_runs(name, tmp_path):
    packages, arguments, expected = RUNS[name]
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed; `make slow` installs it")
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert expected in result.stdout


@pytest.mark.parametrize("name", RUNS)
def test_example_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) <= 60
