"""Full disks, folders that cannot be written, damaged runs: one clear line each, and nothing older lost."""

import os
import pickle
import resource
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

from holdfast.cli import main
from holdfast.keep import RunFolder, open_checkpoint
from kept import apart, lines_of, run, words

HOLDFAST = [sys.executable, "-c", "import sys; from holdfast.cli import main; sys.exit(main())"]
PRIVATE = ["unshare", "--user", "--map-root-user", "--mount"]
"""A place where anybody may mount, and nobody else sees it."""
MAY_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run([*PRIVATE, "mount", "-t", "tmpfs", "x", "/mnt"], capture_output=True).returncode == 0
)
mounting = pytest.mark.skipif(not MAY_MOUNT, reason="this machine lets nobody mount anything, even privately")


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


def of(given):
    return shlex.join([*HOLDFAST, *map(str, given)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"), "whole").folder


@mounting
def test_a_full_disk_is_told_and_what_was_saved_before_stays_and_goes_on(tmp_path, whole):
    (tmp_path / "small").mkdir()
    given = words(tmp_path / "small", trainer__keep_checkpoints=0, trainer__checkpoint_interval=1)
    train = of(given)
    # Room for two checkpoints, and half of a third.
    size = sum(file.stat().st_size for file in (whole / "checkpoints" / "000006").iterdir())
    script = f"""
        mount -t tmpfs -o size={size * 5 // 2} tmpfs small
        set +e
        {train} > out.txt 2> err.txt
        echo $? > code.txt
        cp -a small/x kept
    """
    told = in_private(script, tmp_path)
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "code.txt").read_text() == "1\n"
    said, error = (tmp_path / "out.txt").read_text(), (tmp_path / "err.txt").read_text()
    assert error.startswith("holdfast: Could not write ")
    assert error.endswith(": No space left on device.\n")
    assert error.count("\n") == 1
    assert "No space left on device. Training goes on, and the next checkpoint is tried in its time." in said
    folder = RunFolder(tmp_path / "kept")
    # Every checkpoint that is there is whole, and nothing else is.
    assert folder.numbered()
    assert [open_checkpoint(path).iteration for path in folder.numbered()]
    assert main(["train", "--resume", str(folder.path)]) == 0
    assert apart(whole, folder.path) == []


def test_a_file_that_may_not_grow_is_a_disk_that_is_full(tmp_path):
    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    told = subprocess.run(
        [*HOLDFAST, *map(str, words(tmp_path, policy__hidden_size=64))],
        capture_output=True,
        text=True,
        preexec_fn=limited,
        env=environment() | {"PYTHONDONTWRITEBYTECODE": "1"},
        timeout=120,
    )
    assert told.returncode == 1
    assert (
        "000000: File too large. Training goes on, and the next checkpoint is tried in its time."
        in told.stdout
    )
    assert told.stderr.startswith(
        f"holdfast: Could not write {tmp_path}/x/checkpoints/000006: File too large."
    )
    assert told.stderr.count("\n") == 1
    # All that could be written is there.
    assert len(lines_of(tmp_path / "x")) == 6
    assert not list((tmp_path / "x" / "checkpoints").iterdir())


@mounting
def test_a_folder_that_cannot_be_written_is_told_and_can_still_be_read(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "x", symlinks=True)
    script = f"""
        mount --bind x x
        mount -o remount,bind,ro x
        set +e
        {of(["train", "--resume", "x"])} > out.txt 2> err.txt
        echo $? > code.txt
        {of(["check", "x", "--json"])} > check.txt
        echo $? >> code.txt
    """
    before = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    told = in_private(script, tmp_path)
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "code.txt").read_text() == "2\n0\n"
    assert (
        tmp_path / "err.txt"
    ).read_text() == "holdfast: Cannot write the run's folder x: Read-only file system.\n"
    assert before == {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}


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
    ("how", "told"),
    [
        ("truncated", "000006 is damaged and is not used: "),
        ("flipped", "model.safetensors is not what was written: its checksum differs."),
        ("missing", "model.safetensors is missing."),
        ("empty", "000006 is damaged and is not used: "),
        ("pickle", "is a pickle, which can execute anything when it is loaded; it is not loaded."),
        ("nowhere", "latest points to 000009, which is not there; looking for the newest."),
    ],
)
def test_a_damaged_run_goes_on_from_the_newest_whole_checkpoint(
    tmp_path, monkeypatch, capsys, whole, how, told
):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, tmp_path / "x", symlinks=True)
    damage(tmp_path / "x" / "checkpoints" / "000006", how)
    assert main(["train", "--resume", "x"]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert told in lines[0]
    assert lines[1].startswith("run x goes on after iteration 4 of 6, ")
    assert said.err == ""
    assert apart(whole, tmp_path / "x") == []
    assert not (tmp_path / "executed").exists()
    # What was damaged is put aside, for whoever wants to look at it.
    aside = (tmp_path / "x" / "checkpoints" / "000006.damaged").exists()
    assert aside == (how != "nowhere")


def test_where_nothing_is_whole_nothing_is_touched(tmp_path, capsys, whole):
    shutil.copytree(whole, tmp_path / "x", symlinks=True)
    for path in RunFolder(tmp_path / "x").numbered():
        damage(path, "flipped")
    before = {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
    assert main(["train", "--resume", str(tmp_path / "x")]) == 1
    said = capsys.readouterr()
    assert "has no whole checkpoint: " in said.err
    assert said.err.count("its checksum differs") == 3
    assert said.err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in (tmp_path / "x").rglob("*") if path.is_file()}
