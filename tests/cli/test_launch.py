"""`holdfast train --ranks`: the launcher, as a process."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers.small_runs import TINY

KEYS = {**TINY, "trainer.total_timesteps": 640_000, "trainer.checkpoint_interval": 1, "run": "x", "device": "cpu"}
LIMIT_S = 300
END_S = 60


@pytest.mark.slow
def test_a_killed_rank_ends_the_launch_and_is_named(tmp_path):
    words = [f"{key}={value}" for key, value in KEYS.items()]
    command = [sys.executable, "-m", "holdfast", "train", "recall", "--ranks", "2", *words, f"runs_dir={tmp_path}"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **output) as launcher:
        end = time.monotonic() + LIMIT_S
        while not (tmp_path / "x" / "checkpoints" / "000002").exists():
            assert launcher.poll() is None, launcher.communicate(timeout=END_S)[0]
            assert time.monotonic() < end
            time.sleep(0.05)
        (rank,) = (p for p in psutil.Process(launcher.pid).children() if p.environ().get("RANK") == "1")
        rank.send_signal(signal.SIGKILL)
        text = launcher.communicate(timeout=END_S)[0]
    assert launcher.returncode == 1
    assert f"holdfast: rank 1 (process {rank.pid}) of 2 ended, so the run ends; resume it with --resume" in text
    assert f"holdfast: rank 1 (process {rank.pid}) of 2 was ended by SIGKILL." in text
    assert "Traceback" not in text
