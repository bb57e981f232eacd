"""Runs killed or signalled at random times resume bit for bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers.small_runs import apart, lines_of, words

ROOT = Path(__file__).parents[2]
LONG = {"trainer__total_timesteps": 64 * 100, "trainer__checkpoint_interval": 1, "policy__hidden_size": 64}
"""A checkpoint after every iteration, so that one is being written much of the time."""


def start(folder, args, script="import sys; from holdfast.cli import main; sys.exit(main())"):
    return subprocess.Popen(
        [sys.executable, "-c", script, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def exit_code(process):
    process.communicate(timeout=300)
    return process.returncode


def count_lines(folder):
    file = folder / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def signal_at_random(process, folder, number, generator):
    """Send a signal some time after the next iteration; return the output."""
    before, deadline = count_lines(folder), time.monotonic() + 120
    while count_lines(folder) == before and process.poll() is None:
        assert time.monotonic() < deadline, "no iteration was logged"
        time.sleep(0.002)
    time.sleep(generator.random() * 0.25)
    process.send_signal(number)
    return process.communicate(timeout=60)


def interrupt_and_resume(tmp_path, number, times, seed, **keys):
    """Train without and with interruptions; return both folders, and exit codes and output."""
    keys, generator = {**LONG, **keys}, random.Random(seed)
    whole = start(tmp_path, words(tmp_path, "whole", **keys))
    out, err = whole.communicate(timeout=300)
    assert whole.returncode == 0, out + err
    args, results, folder = words(tmp_path, "parts", **keys), [], tmp_path / "parts"
    for _ in range(times):
        process = start(tmp_path, args)
        out, err = signal_at_random(process, folder, number, generator)
        results.append((process.returncode, out, err))
        args = ["train", "--resume", str(folder)]
    end = start(tmp_path, args)
    out, err = end.communicate(timeout=300)
    assert end.returncode == 0, out + err
    assert err == ""
    return tmp_path / "whole", folder, results


@pytest.mark.parametrize("times", [5, pytest.param(20, marks=pytest.mark.slow)])
def test_sigkill_at_any_time_resumes_bit_for_bit(tmp_path, times):
    whole, parts, results = interrupt_and_resume(tmp_path, signal.SIGKILL, times, seed=times)
    assert apart(whole, parts) == []
    assert [code for code, *_ in results].count(-signal.SIGKILL) >= times - 1
    assert not list((parts / "checkpoints").glob(".*"))


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_sigterm_at_any_time_saves_and_resumes_bit_for_bit(tmp_path, times):
    whole, parts, results = interrupt_and_resume(
        tmp_path, signal.SIGTERM, times, seed=times, trainer__checkpoint_interval=0
    )
    assert apart(whole, parts) == []
    for code, out, err in results:
        assert (code, err) == (1, "")
        assert f"resume with: holdfast train --resume {parts}" in out


DYING = """
import os, signal, sys
from holdfast.cli import main
from holdfast.checkpoint import format

real, left = format.{name}, [{after}]

def die(*args):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)

format.{name} = die
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("_manifest_entry", 13),  # in a file of the third checkpoint
        pytest.param("with_checksum", 3, marks=pytest.mark.slow),  # at its manifest
        pytest.param("sync_together", 3, marks=pytest.mark.slow),  # complete, but not on disk
        pytest.param("set_symlink", 3, marks=pytest.mark.slow),  # renamed, but without symlink
    ],
)
def test_sigkill_while_writing_a_checkpoint_resumes_bit_for_bit(tmp_path, name, after):
    assert exit_code(start(tmp_path, words(tmp_path, "whole"))) == 0
    script = DYING.format(name=name, after=after)
    assert exit_code(start(tmp_path, words(tmp_path, "parts"), script)) == -signal.SIGKILL
    assert exit_code(start(tmp_path, ["train", "--resume", str(tmp_path / "parts")])) == 0
    assert apart(tmp_path / "whole", tmp_path / "parts") == []
    assert not list((tmp_path / "parts" / "checkpoints").glob(".*"))


def test_a_killed_run_loses_at_most_a_checkpoint_interval_and_one_iteration(tmp_path):
    process = start(tmp_path, words(tmp_path, "x", **{**LONG, "trainer__checkpoint_interval": 3}))
    while count_lines(tmp_path / "x") < 14:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.kill()
    process.communicate(timeout=120)
    iterations = len(lines_of(tmp_path / "x"))
    saved = max(int(path.name) for path in (tmp_path / "x" / "checkpoints").glob("[0-9]*"))
    assert iterations - saved <= 3 + 1
