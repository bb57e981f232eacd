"""`holdfast sweep` and `holdfast train seeds=`, as processes and by their errors."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from helpers.small_runs import LEAST
from holdfast.cli import main
from holdfast.cli.train_seeds import _parse_seeds
from holdfast.errors import ConfigError
from holdfast.sweep.trials import TrialStore

RATE = "trainer.optimizer.learning_rate=log:1e-4..1e-2"
KEYS = [f"{key}={value}" for key, value in LEAST.items() if key != "run"]
EPISODES_OF_FIVE = [*KEYS, "world.length=5"]
LIMIT_S = 600


def start(*args):
    command = [sys.executable, "-m", "holdfast", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(condition, process):
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(process.communicate(timeout=LIMIT_S)[0])


def attempts(folder, state):
    """The attempts in a state, of a sweep whose study may not be there yet."""
    if not (folder / "sweep.json").exists():
        return []
    store = TrialStore(f"sqlite:///{folder / 'study.db'}", folder.name)
    store.open()
    return [trial for trial in store.all() if state in ("", trial.state.name)]


def kill_worker_in_a_trial(folder):
    """Kill a worker, stopped first so that its trial does not end meanwhile; return the trial's number."""
    for trial in attempts(folder, "RUNNING"):
        pid = int(trial.user_attrs.get("worker", "m:0").rpartition(":")[2])
        if pid and trial.params:
            os.kill(pid, signal.SIGSTOP)
            if trial.number in [other.number for other in attempts(folder, "RUNNING")]:
                os.kill(pid, signal.SIGKILL)
                return [trial.number]
            os.kill(pid, signal.SIGCONT)
    return []


@pytest.mark.slow
def test_a_sweep_with_a_killed_worker_loses_no_trial_and_counts_none_twice(tmp_path, capsys):
    folder = tmp_path / "s"
    options = [f"--space={RATE}", "--space=policy.memory=lstm,gru", "--trials=12", "--workers=2", "--pruner=none"]
    process = start("sweep", "constant", *options, *EPISODES_OF_FIVE, "run=s", f"runs_dir={tmp_path}")
    (killed,) = wait_for(lambda: kill_worker_in_a_trial(folder), process)
    wait_for(lambda: len(attempts(folder, "COMPLETE")) >= 2, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 1, output
    assert f"holdfast sweep --resume {folder}" in output
    process = start("sweep", "--resume", str(folder), "--workers=2")
    output += process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, output

    assert f"trial {killed}: worker " in output
    assert "was killed by SIGKILL; it is tried again" in output
    trials = attempts(folder, "")
    assert sorted(trial.user_attrs["index"] for trial in trials if trial.state.name == "COMPLETE") == list(range(12))
    # On a busy machine the interruption may end a trial, too, that has just begun.
    failed = [trial for trial in trials if trial.state.name == "FAIL"]
    assert killed in [trial.number for trial in failed]
    assert len(trials) == 12 + len(failed) <= 14
    assert (folder / "sweep.html").stat().st_size > 10_000

    assert main(["runs", str(folder), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [run["name"] for run in runs] == [f"trial-{index:03}-seed-0" for index in range(12)]
    assert all(run["finished"] for run in runs)
    assert main(["train", str(folder / "best.yaml"), "run=again", f"runs_dir={tmp_path}"]) == 0
    assert "greedy return 5.000" in capsys.readouterr().out


def kill_seed(process, seed):
    """Kill the process that trains a seed, if it has started."""
    for child in psutil.Process(process.pid).children():
        if f"seed={seed}" in child.cmdline():
            child.kill()
            return True
    return False


@pytest.mark.slow
def test_a_seed_that_fails_is_named_the_others_go_on_and_a_resume_trains_it_alone(tmp_path, capsys):
    folder = tmp_path / "g"
    process = start("train", "constant", "seeds=0..2", *EPISODES_OF_FIVE, "run=g", f"runs_dir={tmp_path}")
    wait_for(lambda: kill_seed(process, 1), process)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 1, output
    assert "seed 1 failed; it was killed by SIGKILL" in output
    assert "interquartile mean of 2 seeds 5.000, 95 % interval 5.000 to 5.000" in output
    before = json.loads((folder / "seeds.json").read_text())["results"]
    assert [result["finished"] for result in before.values()] == [True, False, True]

    process = start("train", "--resume", str(folder))
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == 0, output
    assert "1 of 3 seeds to train" in output
    assert "interquartile mean of 3 seeds 5.000" in output
    values = json.loads((folder / "seeds.json").read_text())
    assert values["results"]["0"] == before["0"]
    assert values["return_iqm_ci95"] == [5.0, 5.0]
    assert all(result["cpu_seconds"] > 0 for result in values["results"].values())
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert [run["name"] for run in json.loads(capsys.readouterr().out)] == ["g/seed0", "g/seed1", "g/seed2"]


def test_seeds_are_parsed():
    assert _parse_seeds("0..4") == [0, 1, 2, 3, 4]
    assert _parse_seeds("0,3,7") == [0, 3, 7]
    assert _parse_seeds("5") == [5]
    for text in ("", "4..0", "a", "0..", "-1", "1,1", "0..2,2", "1.5"):
        with pytest.raises(ConfigError, match="seeds="):
            _parse_seeds(text)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["recal", f"--space={RATE}"], "did you mean recall?"),
        (["recall"], "needs at least one key that varies"),
        (["recall", f"--space={RATE}", "trainer.ppo.gama=1"], "did you mean trainer.ppo.gamma?"),
        (["recall", "--space=trainer.ppo.gama=0..1"], "did you mean trainer.ppo.gamma?"),
        (["recall", f"--space={RATE}", "--trials=0"], "above 0"),
        (["recall", f"--space={RATE}", "--trails=5"], "--trails"),
        (["recall", f"--space={RATE}", "--pruner=mean"], "median"),
        (["recall", f"--space={RATE}", "seeds=0..4"], "--seeds K"),
        (["recall", f"--space={RATE}", "run=a/b"], "a name is one word"),
        (["recall", "--space=policy.memory=lstm,grru"], "--space policy.memory=lstm,grru: "),
        (["--resume", "nowhere"], "holds no sweep"),
        (["--resume", "nowhere", "recall"], "leave out recall"),
    ],
)
def test_a_wrong_sweep_is_one_line(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["seeds=0..x"], "seeds=0..x: write integers"),
        (["seeds=0..1", "seed=1"], "name two"),
        (["seeds=0..1", "trainer.ppo.gama=1"], "did you mean trainer.ppo.gamma?"),
        (["seeds=0..1", "run=a/b"], "a name is one word"),
    ],
)
def test_wrong_seeds_are_one_line(args, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "recall", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_another_sweep_of_the_same_name_is_refused(tmp_path, capsys):
    folder = tmp_path / "s"
    folder.mkdir()
    place = ["run=s", f"runs_dir={tmp_path}"]
    (folder / "notes.txt").write_text("")
    assert main(["sweep", "recall", f"--space={RATE}", *place]) == 2
    assert "is no sweep" in capsys.readouterr().err
    values = {"study": "s", "storage": "postgresql://me:***@host/x", "recipe": "recall", "keys": {}, "space": [RATE]}
    values |= {"trials": 5, "seeds": 1, "objectives": "return", "pruner": "median"}
    (folder / "sweep.json").write_text(json.dumps(values))
    assert main(["sweep", "recall", f"--space={RATE}", "--seeds=3", *place]) == 2
    assert "seeds 1 → 3" in capsys.readouterr().err
    assert main(["sweep", "--resume", str(folder)]) == 2
    assert "--storage postgresql://me:PASSWORD@host/x" in capsys.readouterr().err
    assert main(["sweep", "--resume", str(folder), "--trials=4"]) == 2
    assert main(["sweep", "--resume", str(folder), "--seeds=4"]) == 2
    (folder / "sweep.json").write_text("{")
    assert main(["sweep", "--resume", str(folder)]) == 2
    assert "is damaged" in capsys.readouterr().err


def test_without_optuna_the_extra_is_named():
    code = (
        "import sys; sys.modules['optuna'] = None; from holdfast.cli import main; "
        f"sys.exit(main(['sweep', 'recall', '--space={RATE}', 'run=x', 'runs_dir=/nowhere']))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 2
    assert result.stderr.startswith("holdfast: holdfast sweep needs the package optuna, which is missing; ")
    assert "[sweep]" in result.stderr
    assert result.stderr.count("\n") == 1
