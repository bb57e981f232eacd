"""A crash rig: kill runs at random moments, resume each until done, and compare it with an uninterrupted run.

`python tests/helpers/crash_rig.py KILLS [SEED]` prints a table over all set-ups.
"""

import contextlib
import io
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

import holdfast
from helpers.forked import in_child
from helpers.small_runs import TINY, apart
from holdfast.checkpoint.run_dir import RunDir
from holdfast.cli import main
from holdfast.worlds.workers.spawn import fork_server

SHORT = {"trainer.checkpoint_interval": 1, "report": "off", "trainer.eval_episodes": 2, "trainer.check": "off"}
"""A checkpoint after every iteration, so that one is being written much of the time."""
SETUPS = {
    "recall": {},
    "gym": {"world": "gym:CartPole-v1"},
    "workers": {"trainer.num_workers": 2},
    "burn_in": {"trainer.stale": "burn_in", "trainer.burn_in": 2, "trainer.checkpoint_interval": 3},
    "muon": {"trainer.optimizer.name": "muon", "trainer.keep_checkpoints": 1},
    "mixture": {"world": "mixture", "world.parts": "recall weight=3 + n_back"},
    "teacher": {"policy": "component:example", "trainer.teachers": "teacher", "trainer.keep_checkpoints": 2},
}


def keys_of(setup, folder):
    """Return the keys of a set-up; a teacher is trained in the folder if there is none."""
    keys = {**TINY, **SHORT, **SETUPS[setup], "runs_dir": str(folder)}
    if "world" in keys:
        del keys["world.delay"]
    if "trainer.teachers" in keys:
        teacher = keys.pop("trainer.teachers")
        if not (folder / teacher).exists():
            holdfast.train(None, {**keys, "run": teacher, "trainer.total_timesteps": 64})
        keys["trainer.teachers"] = str(folder / teacher)
    return keys


def start_or_resume(folder, keys):
    """Resume a run, or start it if it has no checkpoint yet; return the exit code."""
    if RunDir(folder).numbered():
        return main(["train", "--resume", str(folder)])
    shutil.rmtree(folder, ignore_errors=True)
    return main(["train", *(f"{key}={value}" for key, value in keys.items()), f"run={folder.name}"])


@contextlib.contextmanager
def shared_fork_server():
    """Start one fork server for the workers of all forked processes, which only its parent can poll."""
    with fork_server() as server:
        server._process.poll = lambda: None
        yield
        del server._process.poll


def crash(folder, setup, kills, seed=0, *, number=signal.SIGKILL, **more):
    """Kill runs of a set-up at random moments; return the number of kills, of runs, and all differences.

    Kills before the first checkpoint do not count.
    """
    keys, generator = {**keys_of(setup, folder), **more}, random.Random(f"{seed}/{setup}")
    # In this process, so that its forks have imported everything.
    assert start_or_resume(folder / "whole", keys) == 0
    begin = time.monotonic()
    assert in_child(start_or_resume, folder / "timed", keys)[:2] == ("done", "0")
    seconds, runs, count, differences = time.monotonic() - begin, 0, 0, []
    while count < kills:
        run, runs, code = folder / f"run{runs}", runs + 1, ""
        while code != "0":
            delay = generator.uniform(0, seconds) if count < kills else None
            outcome, code, text = in_child(start_or_resume, run, keys, kill_after=delay, number=number)
            is_stopped = outcome == "killed" or "stopped; resume with: holdfast train --resume" in text
            assert code == "0" or is_stopped, f"{run}: {outcome}: {text}"
            if is_stopped and RunDir(run).numbered():
                count += 1
                lost = iterations_lost(run)
                if number == signal.SIGKILL and lost > keys["trainer.checkpoint_interval"] + 1:
                    differences.append(f"{setup}: {lost} iterations lost")
        differences += [f"{setup}: {name}" for name in apart(folder / "whole", run)]
        differences += [f"{setup}: {file.name} is left" for file in (run / "checkpoints").glob(".*")]
        shutil.rmtree(run)
    return count, runs, differences


def iterations_lost(run):
    """Return how many iterations were logged after the newest checkpoint."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    return lines - int(RunDir(run).numbered()[0].name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kills, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    print(f"{'':10}{'kills':>8}{'runs':>8}  bit-equal", flush=True)
    with shared_fork_server():
        for number, setup in enumerate(SETUPS):
            share = kills // len(SETUPS) + (number < kills % len(SETUPS))
            with tempfile.TemporaryDirectory(prefix="crash-") as folder, contextlib.redirect_stdout(io.StringIO()):
                count, runs, differences = crash(Path(folder), setup, share, seed)
            print(f"{setup:10}{count:>8}{runs:>8}  {differences or 'yes'}", flush=True)
