import json
import os
import subprocess
import sys

import pytest
import torch

from holdfast.config import Config, change
from holdfast.errors import ConfigError
from holdfast.keep import RunFolder, create_folder, load_weights
from holdfast.policies import make_policy
from holdfast.recipes import find_recipe
from holdfast.worlds import make_world
from scripted import make_reader

CONFIG = change(find_recipe("recall"), {"seed": 3, "world.delay": "2..9"})


def small_policy(seed):
    return make_policy("fast", make_world("recall", agents=1), seed=seed, hidden_size=4, num_layers=1)


def test_a_new_run_folder_says_what_was_asked(tmp_path):
    config = change(CONFIG, {"runs_dir": str(tmp_path / "deep" / "runs")})
    made = create_folder(config, "name", "holdfast train seed=3", small_policy(0))
    assert made.path == tmp_path / "deep" / "runs" / "name"
    assert Config.model_validate_json((made.path / "config.json").read_text()) == config
    assert json.loads((made.path / "config.json").read_text())["world"]["delay"] == [2, 9]
    lines = dict(line.split(": ", 1) for line in (made.path / "command.txt").read_text().splitlines())
    assert lines["command"] == "holdfast train seed=3"
    assert lines["torch"] == torch.__version__
    assert {"commit", "python", "holdfast", "tensordict", "numpy", "torch threads"} <= lines.keys()


def test_a_folder_outside_any_repository_is_told_as_such(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    made = create_folder(change(CONFIG, {"runs_dir": str(tmp_path)}), "name", "x", small_policy(0))
    assert "commit: not in a git repository\n" in (made.path / "command.txt").read_text()


def test_a_folder_that_exists_is_never_touched(tmp_path):
    config = change(CONFIG, {"runs_dir": str(tmp_path)})
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "mine").write_text("precious")
    (tmp_path / "name-2").write_text("a file")
    made = [create_folder(config, "name", "x", small_policy(0)).path.name for _ in range(3)]
    assert made == ["name-3", "name-4", "name-5"]
    assert os.listdir(tmp_path / "name") == ["mine"]
    assert (tmp_path / "name" / "mine").read_text() == "precious"
    assert (tmp_path / "name-2").read_text() == "a file"


def test_a_place_that_cannot_be_written_is_told_with_the_key_to_set(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    config = change(CONFIG, {"runs_dir": str(tmp_path / "file" / "runs")})
    with pytest.raises(
        ConfigError, match=r"Cannot write .*file/runs/name: Not a directory; set runs_dir=DIR"
    ):
        create_folder(config, "name", "x", small_policy(0))


def test_weights_that_cannot_be_read_are_told(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="does not hold the weights of this policy"):
        load_weights(make_reader(), tmp_path / "model.safetensors")


def test_files_that_grow_are_cut_to_where_they_were(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    (tmp_path / "machine.jsonl").write_text("one\n")
    (tmp_path / "mine.txt").write_text("precious")
    sizes = folder.sizes()
    assert sizes == {"metrics.jsonl": 8, "machine.jsonl": 4}
    for name in ("metrics.jsonl", "machine.jsonl", "trace.txt"):
        with (tmp_path / name).open("a") as file:
            file.write("three\nfou")
    said = []
    folder.cut(sizes, said.append)
    assert (tmp_path / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert (tmp_path / "machine.jsonl").read_text() == "one\n"
    assert (tmp_path / "trace.txt").read_text() == ""
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert said == []
    folder.cut({"metrics.jsonl": 100}, said.append)
    assert said == [
        f"{tmp_path}/metrics.jsonl lacks its last 92 bytes; what comes is added to what is there."
    ]
    assert (tmp_path / "metrics.jsonl").read_text() == "one\ntwo\n"
    # Half a line that is left would spoil the next one.
    (tmp_path / "metrics.jsonl").write_text("one\ntw")
    folder.cut({"metrics.jsonl": 8}, said.append)
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    held = f"""
import pathlib, sys
from holdfast.keep import RunFolder
with RunFolder(pathlib.Path({str(tmp_path)!r})).locked():
    print("held", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen(
        [sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "held\n"
    with (
        pytest.raises(ConfigError, match="is being trained by another process"),
        RunFolder(tmp_path).locked(),
    ):
        pass
    # However it ends: nothing has to be cleaned up by hand.
    other.kill()
    other.communicate()
    with RunFolder(tmp_path).locked():
        assert (tmp_path / ".lock").exists()
