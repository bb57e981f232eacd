"""error.txt: the traceback of an environment that raises, the same with and without workers."""

import re
import sys

import pytest

import holdfast
from helpers.small_runs import LEAST
from holdfast.cli import main

ENV = """
import gymnasium
import numpy as np


class Env(gymnasium.Env):
    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(2)

    def __init__(self, fail_in="step"):
        self.fail_in, self.age = fail_in, 0
        if fail_in == "__init__":
            self.fail()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.fail_in == "reset":
            self.fail()
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.age += 1
        if self.age == 3 and self.fail_in == "step":
            self.fail()
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def fail(self):
        raise ValueError("bad")


class Wrapper(gymnasium.Wrapper):
    def __init__(self, env, fail=True):
        super().__init__(env)
        if fail:
            env.fail()
"""
LINE = ENV.splitlines().index('        raise ValueError("bad")') + 1


def blocks_of(file):
    return [block.split("\n", 1) for block in file.read_text().split("\n\n") if block]


@pytest.fixture
def failing_env(tmp_path, monkeypatch):
    (tmp_path / "failing_env.py").write_text(ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing_env", raising=False)


@pytest.mark.usefixtures("failing_env")
@pytest.mark.parametrize("fail_in", ["step", "reset"])
def test_error_file_is_the_same_with_and_without_workers(tmp_path, capsys, fail_in):
    tracebacks = []
    for workers in (0, 2):
        keys = {
            **LEAST,
            "run": f"workers-{workers}",
            "world": "gym:failing_env:Env",
            "world.options": f"{{fail_in: {fail_in}}}",
            "trainer.num_workers": workers,
            "trainer.async_factor": 1,
        }
        assert main(["train", *[f"{key}={value}" for key, value in keys.items()]]) == 1
        line = capsys.readouterr().err
        file = f"runs/workers-{workers}/error.txt"
        step = {"step": 3, "reset": 0}[fail_in]
        pattern = rf"gym:failing_env:Env, agent 0, step {step}: {fail_in}\(\) failed with ValueError: bad "
        assert re.search(rf"{pattern}\(failing_env.py:{LINE}\).*\. Its traceback is in {file}\.\n$", line)
        assert line.count("\n") == 1
        ((message, traceback),) = blocks_of(tmp_path / file)
        assert line == f"holdfast: {message} Its traceback is in {file}.\n"
        assert f'failing_env.py", line {LINE}, in fail' in traceback
        tracebacks.append(traceback)
    assert tracebacks[0] == tracebacks[1]


CANNOT = {
    "world.options": ("{fail_in: __init__}", "cannot be made"),
    "world.wrappers": ("failing_env:Wrapper", "cannot be wrapped in failing_env:Wrapper"),
}


@pytest.mark.usefixtures("failing_env")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("key", CANNOT)
def test_an_environment_that_cannot_be_made_leaves_its_traceback_alone(tmp_path, capsys, key, workers):
    value, failure = CANNOT[key]
    keys = {**LEAST, "run": "x", "world": "gym:failing_env:Env", "trainer.num_workers": workers}
    args = ["train", *[f"{name}={value}" for name, value in keys.items()]]
    for _ in range(2):
        # The folder of a run that has not begun is taken by the next.
        assert main([*args, f"{key}={value}"]) == 2
        place = f"(failing_env.py:{LINE})"
        message = f"gym:failing_env:Env {failure}: ValueError: bad {place}."
        assert capsys.readouterr().err == f"holdfast: {message} Its traceback is in runs/x/error.txt.\n"
        assert [file.name for file in (tmp_path / "runs").rglob("*")] == ["x", "error.txt"]
        ((first_line, traceback),) = blocks_of(tmp_path / "runs/x/error.txt")
        assert first_line == message
        assert f'failing_env.py", line {LINE}, in fail' in traceback
    if key == "world.wrappers" and not workers:
        with pytest.raises(holdfast.HoldfastError, match=r"step\(\) failed"):
            holdfast.train(config={**keys, key: f"{value}(fail=False)"})
        assert (tmp_path / "runs/x/config.json").exists()
        assert "cannot be wrapped" not in (tmp_path / "runs/x/error.txt").read_text()


def test_a_complete_run_has_no_error_file(tmp_path):
    run = holdfast.train("recall", {**LEAST, "runs_dir": str(tmp_path)})
    assert not (run.folder / "error.txt").exists()
