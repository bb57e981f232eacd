"""Runs with workers: metrics do not depend on their number, and faults lose no iteration."""

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

import holdfast
from helpers.faulty_worlds import HOW, named_memory
from helpers.small_runs import TINY, apart, lines_of, words
from holdfast.checkpoint.run_dir import RunDir
from holdfast.errors import WorkerError
from holdfast.rollout import Collector
from holdfast.worlds.workers import WorkerPool
from holdfast.worlds.workers.spawn import fork_server
from training.test_resume import ask, stopping

pytestmark = pytest.mark.usefixtures("annotations_asleep")
QUICK = {"report": "off", "trainer.eval_episodes": 4, "trainer.check": "off", "trainer.checkpoint_interval": 1}
TIMEOUT = 4.0
PATIENCE = 30.0
"""Seconds beyond the timeout after which a run counts as hanging; the machine may be busy."""


@pytest.fixture(scope="module", autouse=True)
def one_fork_server():
    """Import everything once for all workers of these tests."""
    with fork_server():
        yield


def train(folder, name, workers, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    keys = {**TINY, **QUICK, "runs_dir": str(folder), "run": name, "trainer.num_workers": workers, **keys}
    return holdfast.train(None, {key: value for key, value in keys.items() if value is not None})


def workers_alive():
    """Return the worker processes of this one."""
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    servers = [child for child in children if "workers.spawn" in " ".join(child.cmdline())]
    workers = [child for server in servers for child in server.children()]
    return [child for child in workers if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


WORLDS = {
    "recall": {},
    "truncated": {"world__truncate": True},
    "gym": {"world": "gym:training.test_resume:Sums", "world__delay": None},
    "burn in": {"trainer__stale": "burn_in", "trainer__burn_in": 2},
    "mettagrid": {
        "world": "mettagrid:tmaze",
        "world__delay": None,
        "world__agents": 16,
        "world__mazes": 2,
        "world__limit": 6,
        "trainer__batch_size": 128,
        "trainer__minibatch_size": 64,
        "trainer__total_timesteps": 384,
    },
}


@pytest.mark.parametrize(
    "kind",
    [
        "gym",
        "mettagrid",
        *[pytest.param(k, marks=pytest.mark.slow) for k in ("recall", "truncated", "burn in")],
    ],
)
def test_metrics_do_not_depend_on_the_number_of_workers(tmp_path, kind):
    # Few iterations suffice: a difference stays.
    few = {"trainer__total_timesteps": 192, "trainer__checkpoint_interval": 0, **WORLDS[kind]}
    runs = {workers: train(tmp_path, f"w{workers}", workers, **few) for workers in (1, 4)}
    lines = {workers: lines_of(run.folder) for workers, run in runs.items()}
    assert lines[1] == lines[4]
    assert max(line.get("memory/replay_error", 0.0) for line in lines[1]) <= 1e-5
    # With one group, the same as without workers; with more, smaller batches may round differently.
    alone = lines_of(train(tmp_path, "alone", 0, **few).folder)
    at_once = train(tmp_path, "at_once", 2, trainer__async_factor=1, **few)
    assert alone == lines_of(at_once.folder)
    assert lines[1] == [pytest.approx(line, rel=1e-3, abs=1e-6) for line in alone]


def test_training_steps_run_in_workers(tmp_path, monkeypatch):
    counts, recv = [], WorkerPool.recv
    monkeypatch.setattr(WorkerPool, "recv", lambda self: counts.append(len(self.pids)) or recv(self))
    train(tmp_path, "x", 2)
    assert set(counts) == {2}
    assert len(counts) >= 96
    assert workers_alive() == []


def test_evaluation_starts_no_workers(tmp_path, monkeypatch):
    started, init = [], WorkerPool.__init__

    def record(self, *args, **options):
        started.append(options["workers"])
        init(self, *args, **options)

    monkeypatch.setattr(WorkerPool, "__init__", record)
    assert train(tmp_path, "x", 1, trainer__eval_interval=2).finished
    assert started == [1]


def test_run_with_workers_resumes_bit_for_bit(tmp_path, monkeypatch):
    keys = {"world": "gym:training.test_resume:Sums", "world__delay": None}
    full_run = train(tmp_path, "whole", 2, **keys)
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 4, ask)
        parts = train(tmp_path, "parts", 2, **keys)
    assert not parts.finished
    assert holdfast.train(resume=parts.folder).finished
    assert apart(full_run.folder, parts.folder) == []


def sizes(workers, groups):
    return {"trainer.num_workers": workers, "trainer.async_factor": groups}


@pytest.mark.parametrize("layouts", [[(2, 1), (0, 1)], [(0, 1), (4, 1)], [(1, 2), (4, 2)]])
def test_numbers_of_workers_may_change_on_resume(tmp_path, monkeypatch, layouts):
    keys = {"trainer__total_timesteps": 128, "trainer__eval_episodes": 2}
    full_run = train(tmp_path, "whole", None, **keys, **sizes(*layouts[-1]))
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 2, ask)
        parts = train(tmp_path, "parts", None, **keys, **sizes(*layouts[0]))
    assert not parts.finished
    assert holdfast.train(resume=parts.folder, config=sizes(*layouts[1])).finished
    assert apart(full_run.folder, parts.folder) == []


def test_agents_of_a_restarted_worker_cannot_change_workers(tmp_path):
    keys = {"world": "helpers.faulty_worlds:Faulty", "world__delay": None, "world__marker": str(tmp_path / "marker")}
    run = train(tmp_path, "x", 2, trainer__restart_workers=True, **keys)
    more = {"trainer.total_timesteps": 448}
    with pytest.raises(holdfast.errors.ConfigError, match=r"type trainer.num_workers=2 trainer.async_factor=2\.$"):
        holdfast.train(resume=run.folder, config={**more, "trainer.num_workers": 0})
    assert holdfast.train(resume=run.folder, config=more).finished


def test_resume_after_an_interrupted_first_rollout(tmp_path, monkeypatch):
    full_run = train(tmp_path, "whole", 2)
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 1, ask)
        parts = train(tmp_path, "parts", 2)
    assert parts.checkpoint.name == "000000"
    assert holdfast.train(resume=parts.folder).finished
    assert apart(full_run.folder, parts.folder) == []


@pytest.mark.parametrize("restart", [False, True])
def test_restart_workers_may_change_on_resume(tmp_path, monkeypatch, restart):
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 3, ask)
        parts = train(tmp_path, "x", 2, trainer__restart_workers=restart)
    resumed = holdfast.train(resume=parts.folder, config={"trainer.restart_workers": not restart})
    assert resumed.finished
    assert len(lines_of(resumed.folder)) == 7


def test_errors_of_restarted_workers_are_logged(tmp_path, capsys):
    keys = {
        "world": "helpers.faulty_worlds:Faulty",
        "world__delay": None,
        "world__marker": str(tmp_path / "marker"),
    }
    run = train(tmp_path, "x", 2, trainer__restart_workers=True, **keys)
    assert run.finished
    text = (run.folder / "error.txt").read_text()
    assert text.startswith("Worker 0 of 2 (helpers.faulty_worlds:Faulty, agents 0 to 1) failed")
    assert "in _raise" in text
    assert "Restarted: its 4 agents start new episodes." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"world": "envpool:CartPole-v1", "world__delay": None}, "has its own threads"),
        (
            {"world": "mixture", "world__parts": "recall + n_back", "world__delay": None},
            "cannot be split over",
        ),
    ],
)
def test_worlds_that_cannot_use_workers_are_rejected(tmp_path, keys, message):
    with pytest.raises(holdfast.errors.ConfigError, match=message):
        train(tmp_path, "x", 2, **keys)


@pytest.mark.parametrize("restart", [False, True])
def test_crash_while_saving_the_world_costs_no_iteration(tmp_path, monkeypatch, restart):
    def kill_and_save(self):
        if not killed:
            os.kill(self.pids[1], signal.SIGKILL)
            killed.append(1)
        return state(self)

    killed, state = [], WorkerPool.state
    stopping(monkeypatch, Collector, "rollout", 3, lambda: monkeypatch.setattr(WorkerPool, "state", kill_and_save))
    keys = {"trainer__restart_workers": restart}
    if not restart:
        with pytest.raises(WorkerError, match=r"Worker 1 of 2 .* was ended by SIGKILL"):
            train(tmp_path, "x", 2, **keys)
        assert iterations_saved(tmp_path / "x") == (3, [])
        assert len(lines_of(tmp_path / "x")) == 3
        assert holdfast.train(resume=tmp_path / "x").finished
    else:
        assert train(tmp_path, "x", 2, **keys).finished
    assert len(lines_of(tmp_path / "x")) == 7
    assert all(line["memory/resets"] == line["memory/resets_due"] for line in lines_of(tmp_path / "x")[:-1])


def iterations_saved(folder):
    notes = []
    return RunDir(folder).newest(notes.append).iteration, notes


def train_with_fault(folder, name, chance, *, how, restart):
    """Train with a fault at a random step; return the run, or None, and the error message."""
    workers = chance.choice([1, 2])
    keys = {
        "world": "helpers.faulty_worlds:Faulty",
        "world__delay": None,
        "world__how": "raise" if how == "killed from outside" else how,
        "world__when": 10**6 if how == "killed from outside" else chance.randint(2, 45),
        "world__who": chance.randrange(8),
        "world__marker": str(folder / f"{name}.marker"),
        "trainer__worker_timeout": TIMEOUT,
        "trainer__restart_workers": restart,
        "trainer__async_factor": chance.choice([1, 2]),
    }
    over = threading.Event()
    if how == "killed from outside":
        threading.Thread(target=kill_worker, args=(chance.random() * 0.4, chance.random(), over)).start()
    begun = time.monotonic()
    try:
        return train(folder, name, workers, **keys), ""
    except WorkerError as error:
        return None, str(error)
    finally:
        over.set()
        assert time.monotonic() - begun < TIMEOUT + PATIENCE, "it hung"


def kill_worker(delay, which, over):
    """Kill one of the workers at a random moment."""
    while not workers_alive() and not over.is_set():
        time.sleep(0.001)
    over.wait(delay)
    alive = [] if over.is_set() else workers_alive()
    if alive:
        os.kill(alive[int(which * len(alive))].pid, signal.SIGKILL)


def require_clean(folder):
    assert workers_alive() == []
    assert "memfd:holdfast" not in Path("/proc/self/maps").read_text()
    # A fault before the first iteration leaves nothing to lose.
    if (folder / "metrics.jsonl").exists():
        saved, notes = iterations_saved(folder)
        # Every logged iteration was saved.
        assert saved == sum("eval/return_mean" not in line for line in lines_of(folder))
        assert notes == []


def faults(folder, times, seed):
    chance, kinds = random.Random(seed), []
    for number in range(times):
        how = (*HOW, "killed from outside")[number % (len(HOW) + 1)]
        restart = chance.random() < 0.5
        run, error = train_with_fault(folder, f"r{number}", chance, how=how, restart=restart)
        # Only a worker that completed no step is not restarted.
        assert not (restart and error) or "completed no step" in error or how == "killed from outside"
        gc.collect()
        require_clean(folder / f"r{number}")
        assert (run is None) == bool(error)
        if error:
            assert error.startswith("Worker ")
            kinds.append(how)
        else:
            # Killed too late, or restarted: the run is complete, and every due clear was made.
            assert run.finished
            lines = lines_of(run.folder)[:-1]
            assert all(line["memory/resets"] == line["memory/resets_due"] for line in lines)
            # The first iteration only fills the statistics of normalization.
            assert all(line["memory/replay_error"] <= 1e-5 for line in lines[1:])
    return kinds


def test_few_faults_leave_checkpoints_processes_and_memory_clean(tmp_path, capsys):
    assert faults(tmp_path, 4, seed=1)


@pytest.mark.slow
def test_fifty_faults_leave_checkpoints_processes_and_memory_clean(tmp_path, capsys):
    assert len(set(faults(tmp_path, 50, seed=2))) >= 5


def test_run_ended_by_a_worker_resumes(tmp_path):
    keys = {"world": "helpers.faulty_worlds:Faulty", "world__delay": None, "world__when": 20}
    full_run = train(tmp_path, "whole", 2, **keys, world__marker=str(tmp_path))
    with pytest.raises(WorkerError, match=r"the bottom fell out.*last actions \[.*Its traceback is in .*error.txt\."):
        train(tmp_path, "parts", 2, **keys, world__marker=str(tmp_path / "marker"))
    assert "in _raise" in (tmp_path / "parts" / "error.txt").read_text()
    saved, _ = iterations_saved(tmp_path / "parts")
    assert saved == 2
    assert holdfast.train(resume=tmp_path / "parts").finished
    assert lines_of(full_run.folder) == lines_of(tmp_path / "parts")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_interrupted_run_leaves_no_process_and_no_memory(tmp_path, number):
    endless = {
        "trainer__total_timesteps": 10**7,
        "trainer__num_workers": 2,
        "trainer__checkpoint_interval": 0,
    }
    code = "import sys; from holdfast.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words(tmp_path, "x", **endless)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    file, patience = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 120
    while not (file.exists() and file.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.communicate(timeout=60)
        assert time.monotonic() < patience
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3
    assert named_memory([member.pid for member in family[1:]]) == []
    # Like a terminal: to the whole process group.
    for member in family:
        member.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert "resume with: holdfast train --resume" in out
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    saved, notes = iterations_saved(tmp_path / "x")
    assert saved == len(lines_of(tmp_path / "x"))
    assert notes == []
