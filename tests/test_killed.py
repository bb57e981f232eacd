"""Runs in processes of their own that are killed at any moment, and go on as if they had not been."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kept import apart, lines_of, words

ROOT = Path(__file__).parents[1]
LONG = {"trainer__total_timesteps": 64 * 100, "trainer__checkpoint_interval": 1, "policy__hidden_size": 64}
"""A checkpoint after every iteration: much of the time one is being written."""


def start(folder, given, script="import sys; from holdfast.cli import main; sys.exit(main())"):
    return subprocess.Popen(
        [sys.executable, "-c", script, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def ended(process):
    """Wait for the end; say how it was."""
    process.communicate(timeout=300)
    return process.returncode


def lived(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def strike(process, folder, number, chance):
    """Wait until it lives on, and then some; say what it said."""
    before, patience = lived(folder), time.monotonic() + 120
    while lived(folder) == before and process.poll() is None:
        assert time.monotonic() < patience, "it never lived on"
        time.sleep(0.002)
    time.sleep(chance.random() * 0.25)
    process.send_signal(number)
    return process.communicate(timeout=60)


def kill_and_go_on(tmp_path, number, times, seed, **keys):
    """Train in one go, and with interruptions; return the folders and what was seen on the way."""
    keys, chance = {**LONG, **keys}, random.Random(seed)
    whole = start(tmp_path, words(tmp_path, "whole", **keys))
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, out + err
    given, seen, folder = words(tmp_path, "parts", **keys), [], tmp_path / "parts"
    for _ in range(times):
        process = start(tmp_path, given)
        out, err = strike(process, folder, number, chance)
        seen.append((process.returncode, out, err))
        given = ["train", "--resume", str(folder)]
    end = start(tmp_path, given)
    out, err = end.communicate(timeout=300)
    assert end.returncode == 0, out + err
    assert err == ""
    return tmp_path / "whole", folder, seen


@pytest.mark.parametrize("times", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_a_run_ends_as_if_it_had_not_been(tmp_path, times):
    whole, parts, seen = kill_and_go_on(tmp_path, signal.SIGKILL, times, seed=times)
    assert apart(whole, parts) == []
    assert [code for code, *_ in seen].count(-signal.SIGKILL) >= times - 1
    assert not list((parts / "checkpoints").glob(".*"))


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_asked_to_end_at_any_moment_a_run_goes_on_where_it_was(tmp_path, times):
    whole, parts, seen = kill_and_go_on(
        tmp_path, signal.SIGTERM, times, seed=times, trainer__checkpoint_interval=0
    )
    assert apart(whole, parts) == []
    for code, out, err in seen:
        assert (code, err) == (1, "")
        assert f"it goes on by: holdfast train --resume {parts}" in out


DYING = """
import os, signal, sys
from holdfast.cli import main
from holdfast.keep import checkpoint

real, left = checkpoint.{name}, [{after}]

def dying(*given):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*given)

checkpoint.{name} = dying
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("_write", 15),  # in the third checkpoint, at one of its files
        pytest.param("_write", 18, marks=pytest.mark.slow),  # at its list of files
        pytest.param("sync", 8, marks=pytest.mark.slow),  # whole, but not renamed
        pytest.param("point", 3, marks=pytest.mark.slow),  # renamed, but nothing points to it
    ],
)
def test_killed_while_a_checkpoint_is_written_a_run_ends_as_if_it_had_not_been(tmp_path, name, after):
    whole = start(tmp_path, words(tmp_path, "whole"))
    assert ended(whole) == 0
    parts = start(tmp_path, words(tmp_path, "parts"), DYING.format(name=name, after=after))
    assert ended(parts) == -signal.SIGKILL
    again = start(tmp_path, ["train", "--resume", str(tmp_path / "parts")])
    assert ended(again) == 0
    assert apart(tmp_path / "whole", tmp_path / "parts") == []
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))


def test_a_killed_run_loses_at_most_an_interval_and_the_iteration_it_was_written_in(tmp_path):
    process = start(tmp_path, words(tmp_path, "x", **{**LONG, "trainer__checkpoint_interval": 3}))
    while lived(tmp_path / "x") < 14:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate()
    there = len(lines_of(tmp_path / "x"))
    saved = max(int(path.name) for path in (tmp_path / "x" / "checkpoints").glob("[0-9]*"))
    assert there - saved <= 3 + 1
