"""The folder of a run: its files, its logs, and which checkpoint is used."""

import errno
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from test_format import write

from helpers.component_graphs import SMALL, make_graph_policy
from helpers.scripted_world import make_reader
from holdfast.checkpoint import format, run_dir
from holdfast.checkpoint.run_dir import RunDir, create_run_dir, load_weights
from holdfast.checkpoint.serialization import CorruptFileError, pack_weights
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError
from holdfast.policies import make_policy
from holdfast.recipes import find_recipe
from holdfast.worlds import make_world

CONFIG = override(find_recipe("recall"), {"seed": 3, "world.delay": "2..9"})


def small_policy(seed):
    return make_policy("fast", make_world("recall", agents=1), seed=seed, hidden_size=4, num_layers=1)


def test_new_run_directory_has_config_and_command(tmp_path):
    config = override(CONFIG, {"runs_dir": str(tmp_path / "deep" / "runs")})
    made = create_run_dir(config, "name", "holdfast train seed=3", small_policy(0))
    assert made.path == tmp_path / "deep" / "runs" / "name"
    assert Config.model_validate_json((made.path / "config.json").read_text()) == config
    assert json.loads((made.path / "config.json").read_text())["world"]["delay"] == [2, 9]
    lines = dict(line.split(": ", 1) for line in (made.path / "command.txt").read_text().splitlines())
    assert lines["command"] == "holdfast train seed=3"
    assert lines["torch"] == torch.__version__
    assert {"commit", "python", "holdfast", "tensordict", "numpy", "torch threads"} <= lines.keys()


def test_commit_outside_a_git_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    made = create_run_dir(override(CONFIG, {"runs_dir": str(tmp_path)}), "name", "x", small_policy(0))
    assert "commit: not in a git repository\n" in (made.path / "command.txt").read_text()


def test_an_existing_run_directory_is_never_touched(tmp_path):
    config = override(CONFIG, {"runs_dir": str(tmp_path)})
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "user.txt").write_text("precious")
    (tmp_path / "name-2").write_text("a file")
    made = [create_run_dir(config, "name", "x", small_policy(0)).path.name for _ in range(3)]
    assert made == ["name-3", "name-4", "name-5"]
    assert os.listdir(tmp_path / "name") == ["user.txt"]
    assert (tmp_path / "name" / "user.txt").read_text() == "precious"
    assert (tmp_path / "name-2").read_text() == "a file"


def test_an_unwritable_runs_dir_names_the_key_to_set(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    config = override(CONFIG, {"runs_dir": str(tmp_path / "file" / "runs")})
    with pytest.raises(ConfigError, match=r"Cannot write .*file/runs/name: Not a directory; set runs_dir=DIR"):
        create_run_dir(config, "name", "x", small_policy(0))


def test_unreadable_weights_are_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ConfigError, match="does not hold the weights of this policy"):
        load_weights(make_reader(), tmp_path / "model.safetensors")


def test_logs_are_truncated_to_saved_sizes(tmp_path):
    folder = RunDir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\n")
    (tmp_path / "machine.jsonl").write_text("one\n")
    (tmp_path / "user.txt").write_text("precious")
    sizes = folder.log_state()
    assert {name: entry["bytes"] for name, entry in sizes.items()} == {"metrics.jsonl": 8, "machine.jsonl": 4}
    for name in ("metrics.jsonl", "machine.jsonl", "trace.txt"):
        with (tmp_path / name).open("a") as file:
            file.write("three\nfou")
    log = []
    folder.truncate_logs(sizes, log.append)
    assert (tmp_path / "metrics.jsonl").read_text() == "one\ntwo\n"
    assert (tmp_path / "machine.jsonl").read_text() == "one\n"
    assert (tmp_path / "trace.txt").read_text() == ""
    assert (tmp_path / "user.txt").read_text() == "precious"
    assert log == []
    folder.truncate_logs({"metrics.jsonl": {"bytes": 100, "sha256": ""}}, log.append)
    assert log == [f"{tmp_path}/metrics.jsonl lacks its last 92 bytes; new lines are appended."]
    assert (tmp_path / "metrics.jsonl").read_text() == "one\ntwo\n"
    # An incomplete line is removed.
    (tmp_path / "metrics.jsonl").write_text("one\ntw")
    folder.truncate_logs({"metrics.jsonl": {"bytes": 8, "sha256": ""}}, log.append)
    assert (tmp_path / "metrics.jsonl").read_text() == "one\n"


def test_a_run_directory_is_locked_against_other_processes(tmp_path):
    program = f"""
import pathlib, sys
from holdfast.checkpoint.run_dir import RunDir
with RunDir(pathlib.Path({str(tmp_path)!r})).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""
    other = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "locked\n"
    with (
        pytest.raises(ConfigError, match="is being trained by another process"),
        RunDir(tmp_path).locked(),
    ):
        pass
    # The lock ends with the process, even if it is killed.
    other.kill()
    other.communicate(timeout=120)
    with RunDir(tmp_path).locked():
        assert (tmp_path / ".lock").exists()


def test_a_checkpoint_under_a_wrong_number_is_not_used(tmp_path):
    folder, log = RunDir(tmp_path), []
    for iteration in (5, 6):
        write(folder.checkpoints, iteration)
    shutil.copytree(folder.checkpoints / "000005", folder.checkpoints / "000100")
    assert folder.newest(log.append).iteration == 6
    assert log == [
        f"000100 has a wrong name and is not used: {tmp_path}/checkpoints/000100 holds iteration 5; to use it, rename "
        "it 000005."
    ]
    for name in ("000005", "000006"):
        shutil.rmtree(folder.checkpoints / name)
    with pytest.raises(CorruptFileError, match="holds iteration 5; to use it, rename it 000005"):
        folder.newest(log.append)


def test_a_checkpoint_that_cannot_be_read_is_named_and_the_next_is_used(tmp_path, monkeypatch):
    folder, log = RunDir(tmp_path), []
    for iteration in (4, 5, 6):
        write(folder.checkpoints, iteration, score=float(iteration))
    real = format._verify_file

    def failing(file, entry):
        if file.parent.name in ("000004", "000006"):
            raise OSError(5, "Input/output error")
        real(file, entry)

    monkeypatch.setattr(format, "_verify_file", failing)
    assert folder.newest(log.append).iteration == 5
    assert log[0].startswith("000006 cannot be read and is not used: ")
    assert "Input/output error" in log[0]
    # Neither does an older one end the search for the best.
    assert folder.best() == (5.0, folder.checkpoints / "000005")


def test_a_checkpoint_replaced_while_it_is_opened_is_looked_up_again(tmp_path, monkeypatch):
    folder, log = RunDir(tmp_path), []
    write(folder.checkpoints, 1)
    real = run_dir.open_checkpoint

    def replaced(path):
        if path.name == "000001" and path.exists():
            write(folder.checkpoints, 2)
            shutil.rmtree(path)
        return real(path)

    monkeypatch.setattr(run_dir, "open_checkpoint", replaced)
    assert folder.newest(log.append).iteration == 2
    assert log == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "machine.jsonl", "trace.txt", "command.txt", "error.txt", ".lock"])
def test_links_among_growing_files_are_refused(tmp_path, name):
    (tmp_path / "precious.txt").write_text("precious")
    folder = RunDir(tmp_path / "x")
    folder.path.mkdir()
    file = folder.path / name
    file.symlink_to(tmp_path / "precious.txt")
    with pytest.raises(ConfigError, match=rf"{name} is a link to .*precious.txt; replace it"), folder.locked():
        pass
    file.unlink()
    file.hardlink_to(tmp_path / "precious.txt")
    with pytest.raises(ConfigError, match=rf"{name} has another hard link; replace it by a copy"), folder.locked():
        pass
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file"), folder.locked():
        pass


def test_a_folder_instead_of_a_symlink_is_kept(tmp_path):
    """`mv 000002 best` leaves the only copy of a checkpoint there."""
    folder = RunDir(tmp_path)
    write(folder.checkpoints, 1)
    (folder.checkpoints / "latest").unlink()
    write(folder.checkpoints, 2).rename(folder.checkpoints / "best")
    (folder.checkpoints / "latest").unlink()
    (folder.checkpoints / "latest").mkdir()
    format.set_symlink(folder.checkpoints / "best", "000001")
    folder.quarantine_newer(folder.newest(print))
    assert format.open_checkpoint(folder.checkpoints / "best.unused").iteration == 2
    assert (folder.checkpoints / "latest.unused").is_dir()
    assert (folder.checkpoints / "latest").resolve().name == (folder.checkpoints / "best").resolve().name == "000001"


def test_a_dangling_link_instead_of_a_checkpoint_is_reported(tmp_path):
    folder, log = RunDir(tmp_path), []
    write(folder.checkpoints, 1)
    (folder.checkpoints / "000009").symlink_to("nowhere")
    assert folder.newest(log.append).iteration == 1
    assert len(log) == 1


def test_provenance_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious.txt").write_text("precious")
    folder = RunDir(tmp_path / "x")
    folder.path.mkdir()
    (folder.path / ".config.json.part").symlink_to(tmp_path / "precious.txt")
    folder.append_provenance({"config.json": b"{}"}, "holdfast train")
    assert (tmp_path / "precious.txt").read_text() == "precious"
    assert not (folder.path / "config.json").is_symlink()


def test_a_misnamed_checkpoint_is_set_aside_but_not_called_damaged(tmp_path):
    folder = RunDir(tmp_path)
    write(folder.checkpoints, 1)
    shutil.copytree(folder.checkpoints / "000001", folder.checkpoints / "000007")
    folder.quarantine_newer(folder.newest(print))
    assert (folder.checkpoints / "000007.unused").is_dir()


def test_lines_of_a_log_that_cannot_be_read_back_are_kept_by_a_resume(tmp_path, monkeypatch):
    folder, log, lines = RunDir(tmp_path), [], '{"a": 1}\n{"a": 2}\n'
    (tmp_path / "metrics.jsonl").write_text(lines)
    with monkeypatch.context() as patched:
        patched.setattr(run_dir, "_read_at", lambda file, position: b"")
        state = folder.log_state()
    (tmp_path / "metrics.jsonl").write_text(lines + '{"a": 3}\n')
    folder.truncate_logs(state, log.append)
    assert (tmp_path / "metrics.jsonl").read_text() == lines
    assert log == [f"{tmp_path}/metrics.jsonl has no checksum; new lines are appended."]
    # Once it can be read again, it has a checksum.
    assert folder.log_state()["metrics.jsonl"]["sha256"]


def test_a_log_that_cannot_be_continued_is_named(tmp_path, monkeypatch):
    folder = RunDir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n')
    state = folder.log_state()
    monkeypatch.setattr(run_dir, "file_sha256", fail)
    with pytest.raises(OSError, match=rf"^Could not write {tmp_path}/metrics.jsonl: Input/output error\.$"):
        folder.truncate_logs(state, print)


def fail(*args, **options):
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_teacher_that_cannot_be_copied_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(run_dir.Path, "write_bytes", fail)
    with pytest.raises(OSError, match=rf"^Could not write {tmp_path}/teachers/t: Input/output error\.$"):
        RunDir(tmp_path).keep_teacher("t", {"config.json": b"{}"})


def test_a_log_damaged_in_the_middle_is_reported(tmp_path):
    folder, log = RunDir(tmp_path), []
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    state = folder.log_state()
    folder.truncate_logs(state, log.append)
    assert log == []
    (tmp_path / "metrics.jsonl").write_text('{"a": 1}\n{"a": 3}\n{"a": 4}\n')
    folder.truncate_logs(state, log.append)
    assert log == [
        f"{tmp_path}/metrics.jsonl is damaged: lines differ from those the run wrote; new lines are appended."
    ]


def test_checksums_of_logs_follow_appended_lines(tmp_path):
    folder = RunDir(tmp_path)
    for line in ("one\n", "two\n"):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(line)
        state = folder.log_state()
    assert state == RunDir(tmp_path).log_state()
    assert state["metrics.jsonl"]["bytes"] == 8


def test_a_run_directory_is_locked_against_other_threads(tmp_path):
    with (
        RunDir(tmp_path).locked(),
        pytest.raises(ConfigError, match="is being trained by this process"),
        RunDir(tmp_path).locked(),
    ):
        pass
    with RunDir(tmp_path).locked():
        pass


def test_weights_that_are_not_finite_are_refused(tmp_path):
    policy = small_policy(0)
    weights = policy.state_dict()
    name = next(iter(dict(policy.named_parameters())))
    weights[name].fill_(float("nan"))
    (tmp_path / "model.safetensors").write_bytes(pack_weights(weights))
    with pytest.raises(ConfigError, match=f"has weights that are not finite, in {name}"):
        load_weights(small_policy(1), tmp_path / "model.safetensors")


def test_git_starts_no_program_of_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monitor = tmp_path / "monitor.sh"
    monitor.write_text(f"#!/bin/sh\ntouch {tmp_path}/executed\n")
    monitor.chmod(0o755)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@y"]
    subprocess.run([*git, "init", "-q"], check=True, timeout=300)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True, timeout=300)
    subprocess.run([*git, "config", "core.fsmonitor", str(monitor)], check=True, timeout=300)
    made = create_run_dir(override(CONFIG, {"runs_dir": str(tmp_path / "runs")}), "name", "x", small_policy(0))
    assert "not in a git repository" not in (made.path / "command.txt").read_text()
    assert not (tmp_path / "executed").exists()


def test_git_that_does_not_answer_is_given_up(monkeypatch):
    def hang(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(run_dir.subprocess, "run", hang)
    assert run_dir._commit() == "not in a git repository"


def test_the_graph_of_a_component_policy_is_copied(tmp_path):
    config = override(CONFIG, {"runs_dir": str(tmp_path)})
    made = create_run_dir(config, "name", "x", make_graph_policy(SMALL))
    assert (made.path / "agent.yaml").read_text() == SMALL
    assert not (create_run_dir(config, "name", "x", small_policy(0)).path / "agent.yaml").exists()


def test_checkpoints_are_ordered_by_number(tmp_path):
    folder = RunDir(tmp_path)
    for iteration in (999_999, 1_000_000, 2):
        write(folder.checkpoints, iteration)
    assert [path.name for path in folder.numbered()] == ["1000000", "999999", "000002"]


def test_damaged_checkpoints_of_one_number_get_numbers_of_their_own(tmp_path):
    folder, log = RunDir(tmp_path), []
    good = write(folder.checkpoints, 1)
    for _ in range(3):
        (write(folder.checkpoints, 2) / "config.json").write_text("damaged")
        folder.quarantine_newer(folder.newest(log.append))
    names = sorted(path.name for path in folder.checkpoints.glob("000002*"))
    assert names == ["000002.damaged", "000002.damaged-2", "000002.damaged-3"]
    (good / "config.json").write_text("damaged")
    (write(folder.checkpoints, 3) / "config.json").write_text("damaged")
    with pytest.raises(CorruptFileError) as caught:
        folder.newest(log.append)
    reasons = "; ".join(f"{folder.checkpoints}/{name}/config.json has 7 bytes, not 2" for name in ("000003", "000001"))
    assert str(caught.value) == f"{tmp_path} has no valid checkpoint: {reasons}."
