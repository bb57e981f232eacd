"""Runs whose worlds live in workers: the same numbers for any number of them, and nothing lost by a fault."""

import gc
import os
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

import holdfast
from faulty import HOW, named_memory
from holdfast.experience import Collector
from holdfast.keep import RunFolder
from holdfast.worlds.pool import Pool, WorkerError
from holdfast.worlds.pool.nursery import nursery
from kept import TINY, apart, lines_of, words
from test_killed import start
from test_resume import ask, stopping

pytestmark = pytest.mark.usefixtures("annotations_asleep")
QUICK = {"trainer.eval_episodes": 4, "trainer.check": "off", "trainer.checkpoint_interval": 1}
TIMEOUT = 4.0
PATIENCE = 30.0
"""Seconds beyond that after which a run hangs: it is short, but the machine may be busy."""


@pytest.fixture(scope="module", autouse=True)
def one_nursery():
    """Load everything once for all workers of these tests."""
    with nursery():
        yield


def train(folder, name, workers, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    told = {**TINY, **QUICK, "runs_dir": str(folder), "run": name, "trainer.num_workers": workers, **keys}
    return holdfast.train(None, {key: value for key, value in told.items() if value is not None})


def workers_alive():
    """The processes that were born for this one."""
    mine = psutil.Process().children()
    births = [each for each in mine if "pool.nursery" in " ".join(each.cmdline())]
    found = [child for each in births for child in each.children()]
    return [child for child in found if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]


WORLDS = {
    "recall": {},
    "truncated": {"world__truncate": True},
    "gym": {"world": "gym:test_resume:Sums", "world__delay": None},
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
def test_any_number_of_workers_gives_the_same_numbers(tmp_path, kind):
    # Few iterations show it: what differs once differs ever after.
    few = {"trainer__total_timesteps": 192, "trainer__checkpoint_interval": 0, **WORLDS[kind]}
    runs = {workers: train(tmp_path, f"w{workers}", workers, **few) for workers in (1, 2, 4)}
    lines = {workers: lines_of(run.folder) for workers, run in runs.items()}
    assert lines[1] == lines[2] == lines[4]
    assert max(line.get("memory/replay_error", 0.0) for line in lines[1]) <= 1e-5
    # And where as many are answered at once, the same as without any.
    alone = train(tmp_path, "alone", 0, **few)
    at_once = train(tmp_path, "at_once", 2, trainer__async_factor=1, **few)
    assert lines_of(alone.folder) == lines_of(at_once.folder)


def test_what_is_lived_in_workers_is_really_lived_there(tmp_path, monkeypatch):
    told, right = [], Pool.turn
    monkeypatch.setattr(Pool, "turn", lambda self: told.append(len(self.pids)) or right(self))
    train(tmp_path, "x", 2)
    assert set(told) == {2}
    assert len(told) >= 96
    assert workers_alive() == []


def test_an_evaluation_starts_no_workers(tmp_path, monkeypatch):
    started, right = [], Pool.__init__

    def noting(self, *given, **named):
        started.append(named["workers"])
        right(self, *given, **named)

    monkeypatch.setattr(Pool, "__init__", noting)
    assert train(tmp_path, "x", 1, trainer__eval_interval=2).finished
    assert started == [1]


def test_a_run_in_workers_goes_on_bit_for_bit(tmp_path, monkeypatch):
    keys = {"world": "gym:test_resume:Sums", "world__delay": None}
    whole = train(tmp_path, "whole", 2, **keys)
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 4, ask)
        parts = train(tmp_path, "parts", 2, **keys)
    assert not parts.finished
    assert holdfast.train(resume=parts.folder).finished
    assert apart(whole.folder, parts.folder) == []
    with pytest.raises(holdfast.errors.ConfigError, match=r"trainer.num_workers=4 cannot be changed"):
        holdfast.train(resume=parts.folder, overrides={"trainer.num_workers": 4})


def test_a_run_whose_first_rollout_never_ended_goes_on(tmp_path, monkeypatch):
    whole = train(tmp_path, "whole", 2)
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 1, ask)
        parts = train(tmp_path, "parts", 2)
    assert parts.checkpoint.name == "000000"
    assert holdfast.train(resume=parts.folder).finished
    assert apart(whole.folder, parts.folder) == []


@pytest.mark.parametrize("restart", [False, True])
def test_lost_workers_may_be_started_anew_or_not_when_a_run_goes_on(tmp_path, monkeypatch, restart):
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 3, ask)
        parts = train(tmp_path, "x", 2, trainer__restart_workers=restart)
    gone_on = holdfast.train(resume=parts.folder, overrides={"trainer.restart_workers": not restart})
    assert gone_on.finished
    assert len(lines_of(gone_on.folder)) == 7


def test_what_lost_workers_said_is_kept(tmp_path, capsys):
    keys = {"world": "faulty:Faulty", "world__delay": None, "world__marker": str(tmp_path / "marker")}
    run = train(tmp_path, "x", 2, trainer__restart_workers=True, **keys)
    assert run.finished
    said = (run.folder / "lost_workers.txt").read_text()
    assert said.startswith("Worker 0 of 2 (faulty:Faulty, agents 0 to 1) failed")
    assert "in _raise" in said
    assert "Started anew: its 4 agents begin new episodes." in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"world": "envpool:CartPole-v1", "world__delay": None}, "has threads of its own"),
        ({"world": "mixture", "world__parts": "recall + n_back", "world__delay": None}, "not shared out"),
    ],
)
def test_worlds_that_workers_are_no_use_to_are_refused(tmp_path, keys, told):
    with pytest.raises(holdfast.errors.ConfigError, match=told):
        train(tmp_path, "x", 2, **keys)


@pytest.mark.parametrize("restart", [False, True])
def test_a_worker_that_is_lost_while_it_says_where_it_is_costs_no_iteration(tmp_path, monkeypatch, restart):
    def lose(self):
        if not lost:
            os.kill(self.pids[1], signal.SIGKILL)
            lost.append(1)
        return right(self)

    lost, right = [], Pool.state
    stopping(monkeypatch, Collector, "rollout", 3, lambda: monkeypatch.setattr(Pool, "state", lose))
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
    return RunFolder(folder).newest(notes.append).iteration, notes


def struck(folder, name, chance, *, how, restart):
    """Train until a fault at a drawn moment ends the run or one of its workers; say what came of it."""
    workers = chance.choice([1, 2])
    keys = {
        "world": "faulty:Faulty",
        "world__delay": None,
        "world__how": "raise" if how == "struck" else how,
        "world__when": 10**6 if how == "struck" else chance.randint(2, 45),
        "world__who": chance.randrange(8),
        "world__marker": str(folder / f"{name}.marker"),
        "trainer__worker_timeout": TIMEOUT,
        "trainer__restart_workers": restart,
        "trainer__async_factor": chance.choice([1, 2]),
    }
    over = threading.Event()
    if how == "struck":
        threading.Thread(target=strike, args=(chance.random() * 0.4, chance.random(), over)).start()
    begun = time.monotonic()
    try:
        return train(folder, name, workers, **keys), ""
    except WorkerError as error:
        return None, str(error)
    finally:
        over.set()
        assert time.monotonic() - begun < TIMEOUT + PATIENCE, "it hung"


def strike(delay, which, over):
    """Kill one of the workers when there are any, at a drawn moment."""
    while not workers_alive() and not over.is_set():
        time.sleep(0.001)
    over.wait(delay)
    alive = [] if over.is_set() else workers_alive()
    if alive:
        os.kill(alive[int(which * len(alive))].pid, signal.SIGKILL)


def require_clean(folder):
    assert workers_alive() == []
    assert "memfd:holdfast" not in Path("/proc/self/maps").read_text()
    # Struck before anything was lived, nothing is there to be lost.
    if (folder / "metrics.jsonl").exists():
        saved, notes = iterations_saved(folder)
        # Every whole iteration was kept; what was told of is what can be gone on from.
        assert saved == sum("eval/return_mean" not in line for line in lines_of(folder))
        assert notes == []


def faults(folder, times, seed):
    chance, seen = random.Random(seed), []
    for number in range(times):
        how = (*HOW, "struck")[number % (len(HOW) + 1)]
        restart = chance.random() < 0.5
        run, told = struck(folder, f"r{number}", chance, how=how, restart=restart)
        # Only one that was struck before it did anything is not started anew.
        assert not (restart and told) or "did nothing" in told or how == "struck"
        gc.collect()
        require_clean(folder / f"r{number}")
        assert (run is None) == bool(told)
        if told:
            assert told.startswith("Worker ")
            seen.append(how)
        else:
            # Struck too late, or started anew: then the run is whole, and every clear that was due was made.
            assert run.finished
            for line in lines_of(run.folder)[:-1]:
                assert line["memory/resets"] == line["memory/resets_due"]
                assert line["memory/replay_error"] <= 1e-5
    return seen


def test_a_fault_at_any_moment_costs_no_checkpoint_no_process_and_no_memory(tmp_path, capsys):
    assert faults(tmp_path, 4, seed=1)


@pytest.mark.slow
def test_fifty_faults_cost_no_checkpoint_no_process_and_no_memory(tmp_path, capsys):
    assert len(set(faults(tmp_path, 50, seed=2))) >= 5


def test_a_run_that_a_worker_ended_goes_on_where_it_was(tmp_path):
    keys = {"world": "faulty:Faulty", "world__delay": None, "world__when": 20}
    whole = train(tmp_path, "whole", 2, **keys, world__marker=str(tmp_path))
    with pytest.raises(WorkerError, match=r"(?s)the bottom fell out.*last actions \[.*in _raise"):
        train(tmp_path, "parts", 2, **keys, world__marker=str(tmp_path / "marker"))
    saved, _ = iterations_saved(tmp_path / "parts")
    assert saved == 2
    assert holdfast.train(resume=tmp_path / "parts").finished
    assert lines_of(whole.folder) == lines_of(tmp_path / "parts")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_asked_to_end_a_run_leaves_no_process_and_no_memory(tmp_path, number):
    endless = {
        "trainer__total_timesteps": 10**7,
        "trainer__num_workers": 2,
        "trainer__checkpoint_interval": 0,
    }
    process = start(tmp_path, words(tmp_path, "x", **endless))
    file, patience = tmp_path / "x" / "metrics.jsonl", time.monotonic() + 120
    while not (file.exists() and file.read_bytes().count(b"\n") >= 2):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < patience
        time.sleep(0.01)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) == 3
    assert named_memory([each.pid for each in family[1:]]) == []
    # As a terminal does: everybody in the group hears it.
    for each in family:
        each.send_signal(number)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (1, "")
    assert "it goes on by: holdfast train --resume" in out
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    saved, notes = iterations_saved(tmp_path / "x")
    assert saved == len(lines_of(tmp_path / "x"))
    assert notes == []
