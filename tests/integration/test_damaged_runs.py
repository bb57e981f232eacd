"""Full disks, read-only folders and damaged runs: one clear line each, and no earlier checkpoint lost."""

import os
import pickle
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.small_runs import apart, lines_of, run, words
from holdfast.checkpoint import run_dir
from holdfast.checkpoint.format import open_checkpoint
from holdfast.checkpoint.run_dir import RunDir
from holdfast.cli import main

HOLDFAST = [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main())"]
PRIVATE = ["unshare", "--user", "--map-root-user", "--mount"]
"""A private mount namespace."""
MAY_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run([*PRIVATE, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True, timeout=300).returncode
    == 0
)
mounting = pytest.mark.skipif(not MAY_MOUNT, reason="private mounts are not permitted here")


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def in_private(script, folder):
    return subprocess.run(
        [*PRIVATE, "sh", "-ec", script],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
        timeout=120,
    )


def shell_command(args):
    return shlex.join([*HOLDFAST, *map(str, args)])


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), "whole").folder


@mounting
def test_a_full_disk_is_reported_and_earlier_checkpoints_resume(tmp_path, full_run):
    (tmp_path / "small").mkdir()
    args = words(tmp_path / "small", trainer__keep_checkpoints=0, trainer__checkpoint_interval=1)
    train = shell_command(args)
    # Space for two and a half checkpoints.
    size = sum(file.stat().st_size for file in (full_run / "checkpoints" / "000006").iterdir())
    script = f"""
        mount -t tmpfs -o size={size * 5 // 2} tmpfs small
        set +e
        {train} > out.txt 2> err.txt
        echo $? > code.txt
        cp -a small/x copy
    """
    result = in_private(script, tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "code.txt").read_text() == "1\n"
    output, error = (tmp_path / "out.txt").read_text(), (tmp_path / "err.txt").read_text()
    assert error.startswith("holdfast: Could not write ")
    assert error.endswith(": No space left on device; free some space on its disk.\n")
    assert error.count("\n") == 1
    assert "free some space on its disk. Training continues; the next checkpoint is tried when due." in output
    folder = RunDir(tmp_path / "copy")
    # Every checkpoint is valid.
    assert folder.numbered()
    assert [open_checkpoint(path).iteration for path in folder.numbered()]
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert apart(full_run, folder.path) == []


def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    result = subprocess.run(
        [*HOLDFAST, *map(str, words(tmp_path, policy__hidden_size=64))],
        capture_output=True,
        text=True,
        preexec_fn=limit,
        env=environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )
    assert result.returncode == 1
    assert "000000: File too large. Training continues; the next checkpoint is tried when due." in result.stdout
    assert result.stderr.startswith(f"holdfast: Could not write {tmp_path}/x/checkpoints/000006: File too large.")
    assert result.stderr.count("\n") == 1
    # The metrics could be written.
    assert len(lines_of(tmp_path / "x")) == 6
    assert not list((tmp_path / "x" / "checkpoints").iterdir())


@pytest.mark.slow
@mounting
def test_a_read_only_run_is_refused_for_resume_and_can_be_checked(tmp_path, full_run):
    shutil.copytree(full_run, tmp_path / "x", symlinks=True)
    script = f"""
        mount --bind x x
        mount -o remount,bind,ro x
        set +e
        {shell_command(["train", "--resume", "x"])} > out.txt 2> err.txt
        echo $? > code.txt
        {shell_command(["check", "x", "--json"])} > check.txt
        echo $? >> code.txt
    """
    before = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    result = in_private(script, tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "code.txt").read_text() == "2\n0\n"
    assert (tmp_path / "err.txt").read_text() == "holdfast: Cannot write the run's folder x: Read-only file system.\n"
    assert before == {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("where", "name", "file"),
    [
        (Path, "write_bytes", "config.json"),
        (Path, "symlink_to", "checkpoints"),
        (run_dir, "_provenance", "command.txt"),
        (run_dir, "_truncate_log", "metrics.jsonl"),
    ],
)
def test_a_resume_onto_a_full_disk_names_the_file(tmp_path, monkeypatch, capsys, full_run, where, name, file):
    shutil.copytree(full_run, tmp_path / "x", symlinks=True)
    with (tmp_path / "x" / "metrics.jsonl").open("a") as metrics:
        metrics.write("{}\n")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(where, name, full)
    assert main(["train", "--resume", str(tmp_path / "x")]) == 1
    error = f"holdfast: Could not write {tmp_path}/x/{file}: No space left on device; free some space on its disk.\n"
    assert capsys.readouterr().err == error


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def damage(path, how):
    weights, pointer = path / "model.safetensors", path.with_name("latest")
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif how == "flipped":
        data = bytearray(weights.read_bytes())
        data[-3] ^= 1
        weights.write_bytes(data)
    elif how == "missing":
        weights.unlink()
    elif how == "empty":
        shutil.rmtree(path)
        path.mkdir()
    elif how == "pickle":
        weights.write_bytes(pickle.dumps(Payload()))
    else:
        shutil.rmtree(path)
        pointer.unlink()
        pointer.symlink_to("000009")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("truncated", "000006 is damaged and is not used: "),
        ("flipped", "model.safetensors is damaged: its checksum differs."),
        ("missing", "model.safetensors is missing."),
        ("empty", "000006 is damaged and is not used: "),
        ("pickle", "is a pickle, which can execute code when loaded; it is not loaded."),
        ("dangling", "latest points to 000009, which does not exist; using the newest."),
    ],
)
def test_a_damaged_run_resumes_from_the_newest_valid_checkpoint(tmp_path, monkeypatch, capsys, full_run, how, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(full_run, tmp_path / "x", symlinks=True)
    damage(tmp_path / "x" / "checkpoints" / "000006", how)
    assert main(["train", "--resume", "x"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert message in lines[0]
    assert lines[1].startswith("run x resumes after iteration 4 of 6, ")
    assert captured.err == ""
    assert apart(full_run, tmp_path / "x") == []
    assert not (tmp_path / "executed").exists()
    # The damaged checkpoint is renamed.
    renamed = (tmp_path / "x" / "checkpoints" / "000006.damaged").exists()
    assert renamed == (how != "dangling")


def test_a_run_without_valid_checkpoint_is_not_touched(tmp_path, capsys, full_run):
    shutil.copytree(full_run, tmp_path / "x", symlinks=True)
    for path in RunDir(tmp_path / "x").numbered():
        damage(path, "flipped")
    before = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(tmp_path / "x")]) == 1
    captured = capsys.readouterr()
    assert "has no valid checkpoint: " in captured.err
    assert captured.err.count("its checksum differs") == 3
    assert captured.err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
