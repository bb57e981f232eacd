"""Runs killed or signalled at random times resume bit for bit.

`PYTHONPATH=tests python tests/helpers/crash_rig.py 100` kills a hundred.
"""

import os
import signal
import time
from contextlib import nullcontext

import pytest

from helpers.crash_rig import SETUPS, crash, keys_of, shared_fork_server, start_or_resume
from helpers.forked import in_child
from helpers.small_runs import apart
from holdfast.checkpoint import format, manager
from holdfast.checkpoint.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("annotations_asleep")


@pytest.mark.parametrize(("setup", "kills"), [("recall", 3), ("teacher", 2)])
def test_sigkill_at_any_time_resumes_bit_for_bit(tmp_path, setup, kills):
    count, _, differences = crash(tmp_path, setup, kills)
    assert differences == []
    assert count == kills


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS)
def test_sigkill_in_every_setup_resumes_bit_for_bit(tmp_path, setup):
    with shared_fork_server() if setup == "workers" else nullcontext():
        assert crash(tmp_path, setup, 4, seed=1)[2] == []


@pytest.mark.parametrize("times", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_sigterm_at_any_time_saves_and_resumes_bit_for_bit(tmp_path, times):
    keys = {"trainer.checkpoint_interval": 0}
    assert crash(tmp_path, "recall", times, number=signal.SIGTERM, **keys)[2] == []


def stop_on_a_slow_disk(folder, keys, seconds, number):
    """Start a run whose disk takes seconds for each sync, and stop it in one of them."""
    real, syncs = os.fsync, []

    def fsync(handle):
        syncs.append(handle)
        if len(syncs) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(seconds)
        real(handle)

    os.fsync, manager.SLOW_S = fsync, seconds / 2
    return start_or_resume(folder, keys)


@pytest.mark.parametrize(("interval", "number"), [(0, 1), (1, 12)])
def test_stop_on_a_slow_disk_saves_and_says_so(full_run, interval, number):
    folder = full_run.with_name(f"slow-{interval}")
    keys = keys_of("recall", full_run.parent) | {"trainer.checkpoint_interval": interval}
    outcome, code, text = in_child(stop_on_a_slow_disk, folder, keys, 0.2, number)
    assert (outcome, code) == ("done", "1"), text
    newest = RunDir(folder).newest(print)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert newest.iteration == len(lines) > 0
    assert "the disk is slow: a checkpoint is still being written" in text
    assert f"saved in {newest.path}" in text or f"saved {newest.path}" in text
    assert in_child(start_or_resume, folder, keys)[:2] == ("done", "0")
    assert apart(full_run, folder) == []


def start_dying(folder, keys, name, after):
    """Start a run that kills itself at a call of a function."""
    real, calls = getattr(format, name), []

    def die(*args):
        calls.append(name)
        if len(calls) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    setattr(format, name, die)
    return start_or_resume(folder, keys)


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert start_or_resume(folder, keys_of("recall", folder.parent)) == 0
    return folder


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("_manifest_entry", 13),  # in a file of the third checkpoint
        ("with_checksum", 3),  # at its manifest
        ("sync_together", 3),  # complete, but not on disk
        ("set_symlink", 3),  # renamed, but without symlink
    ],
)
def test_sigkill_while_writing_a_checkpoint_resumes_bit_for_bit(full_run, name, after):
    folder, keys = full_run.with_name(f"{name}-{after}"), keys_of("recall", full_run.parent)
    assert in_child(start_dying, folder, keys, name, after)[2] == "the process died"
    assert in_child(start_or_resume, folder, keys)[:2] == ("done", "0")
    assert apart(full_run, folder) == []
    assert not list((folder / "checkpoints").glob(".*"))
