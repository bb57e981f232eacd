"""Resumed runs are bit-equal to uninterrupted ones."""

import copy
import json
import shutil
import signal
from contextlib import contextmanager

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import holdfast
from helpers.small_runs import TINY, apart, iterate, lines_of, run, sign, words
from holdfast.build import build_policy, build_world
from holdfast.checkpoint.format import Checkpoint, environment, open_checkpoint, write_checkpoint
from holdfast.checkpoint.manager import CheckpointManager
from holdfast.checkpoint.run_dir import RunDir
from holdfast.checkpoint.serialization import CorruptFileError
from holdfast.cli import main
from holdfast.config.run import override
from holdfast.learn import Learner
from holdfast.memory.kernels import autotune as kernels
from holdfast.policies import Fast
from holdfast.recipes import find_recipe
from holdfast.report.console import RunConsole
from holdfast.rollout import Collector
from holdfast.training.stop import MESSAGE
from holdfast.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("annotations_asleep")


class DropoutFast(Fast):
    """Draws from torch's global generator in every call."""

    def encode(self, obs):
        return nn.functional.dropout(super().encode(obs), 0.1)


class Sums(gymnasium.Env):
    """Random observations and the last action; episodes of random length."""

    observation_space = spaces.Box(-10, 10, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps_left = int(self.np_random.integers(2, 6))
        return self._obs(0), {}

    def step(self, action):
        self._steps_left -= 1
        return self._obs(action), float(action), self._steps_left == 0, False, {}

    def _obs(self, action):
        return np.array([self.np_random.normal(), action, self._steps_left], np.float32)


GRAPH = {"agent": "fast"}
KINDS = {
    "plain": {},
    "recompute": {"trainer.stale": "recompute", "trainer.update_epochs": 2},
    "burn_in": {"trainer.stale": "burn_in", "trainer.burn_in": 2},
    "muon": {"trainer.optimizer.name": "muon", "trainer.ppo.l2_init": 0.1, "trainer.clip_range": 2.0},
    "sampling": {
        "trainer.sampling.method": "prioritized",
        "trainer.ppo.advantage": "vtrace",
        "schedule.trainer.ppo.ent_coef": "linear:0",
        "trainer.analyze_weights_interval": 2,
        "trainer.monitor": "every:2",
        "trainer.check": "every:3",
    },
    "gru": {"policy.memory": "gru"},
    "bfloat16": {"policy.precision": "bfloat16", "policy.num_layers": 2},
    "no memory": {"policy.memory": "none"},
    "never cleared": {"memory.clear_on": "never"},
    "draws": {"policy": "test_resume:DropoutFast", "trainer.check": "off"},
    "graph": GRAPH,
    "truncated": {"world.truncate": True},
    "arena": {
        "world": "arena",
        "world.length": 6,
        "world.size": 12,
        "world.agents": 24,
        "trainer.batch_size": 192,
        "trainer.minibatch_size": 96,
        "trainer.total_timesteps": 1152,
    },
    "mixture": {"world": "mixture", "world.parts": "recall weight=3 + n_back", "world.agents": 8},
    "gym": {"world": "gym:test_resume:Sums"},
    "gym, inputs": {
        "world": "gym:test_resume:Sums",
        "world.previous_action": True,
        "world.autoreset": "next_step",
    },
    "pettingzoo": {
        "world": "pettingzoo:helpers.pettingzoo_envs:Guests",
        "world.agents": 6,
        "trainer.batch_size": 48,
        "trainer.minibatch_size": 24,
        "trainer.total_timesteps": 288,
    },
    "evaluated": {"trainer.eval_interval": 1},
}


def keys_of(kind):
    keys = dict(KINDS[kind])
    if "world" in keys:
        keys |= {"world.delay": None}
    return keys


def start(folder, name, kind, **more):
    keys = {**TINY, "runs_dir": str(folder), "run": name, **keys_of(kind), **more}
    return holdfast.train(None, {key: value for key, value in keys.items() if value is not None})


class CrashError(BaseException):
    """An error that no code handles."""


def stopping(monkeypatch, cls, method, call, action):
    """Do something at the start of one call of a method."""
    real, calls = getattr(cls, method), []

    def wrapper(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            action()
        return real(*args, **kwargs)

    monkeypatch.setattr(cls, method, wrapper)


def request_stop():
    """The first signal: stop after the current iteration."""
    signal.raise_signal(signal.SIGTERM)


def ask():
    """Two signals: stop now."""
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_resumes_bit_for_bit(tmp_path, monkeypatch, kind):
    full_run = start(tmp_path, "whole", kind)
    with monkeypatch.context() as patched:
        # In the fourth rollout: two iterations after the last checkpoint that is due, one after a boundary.
        stopping(patched, Collector, "rollout", 4, ask)
        parts = start(tmp_path, "parts", kind)
    assert not parts.finished
    assert parts.checkpoint.name == "000003"
    resumed = holdfast.train(resume=parts.folder)
    assert resumed.finished
    assert apart(full_run.folder, parts.folder) == []
    assert {k: v for k, v in full_run.summary.items() if k.startswith("eval/")} == {
        k: v for k, v in resumed.summary.items() if k.startswith("eval/")
    }


@pytest.fixture(scope="module")
def full_run(tmp_path_factory):
    """A run that was not interrupted."""
    return run(tmp_path_factory.mktemp("full"), "whole")


CALLS = [
    (Collector, "_env_step", 8),
    (Learner, "_minibatch_step", 2),
    (Learner, "refresh", 1),
    (Collector, "rollout", 1),
    (RunConsole, "show", 1),
    (RunDir, "log_state", 1),
]
"""Methods, and how often an iteration calls them."""


def test_first_signal_completes_the_iteration_and_resumes_bit_for_bit(full_run, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        stopping(patched, Learner, "_minibatch_step", 9, request_stop)
        parts = run(tmp_path, "parts")
    assert not parts.finished
    assert parts.checkpoint.name == "000003"
    assert [line["iteration"] for line in lines_of(parts.folder)] == [1, 2, 3]
    output = capsys.readouterr().out
    assert output.count(MESSAGE) == 1
    assert f"saved {parts.checkpoint}\n" in output or f"saved in {parts.checkpoint}\n" in output
    assert holdfast.train(resume=parts.folder).finished
    assert apart(full_run.folder, parts.folder) == []


def test_second_signal_during_the_final_save_does_not_break_it(tmp_path, monkeypatch):
    stopping(monkeypatch, Learner, "refresh", 3, request_stop)
    stopping(monkeypatch, CheckpointManager, "save_final", 1, request_stop)
    made = run(tmp_path)
    assert not made.finished
    assert made.checkpoint.name == "000003"


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_runs_interrupted_anywhere_and_repeatedly_resume_bit_for_bit(full_run, tmp_path_factory, data):
    folder, resumed = tmp_path_factory.mktemp("runs"), None
    for _ in range(data.draw(st.integers(1, 3), label="interruptions")):
        cls, method, often = data.draw(st.sampled_from(CALLS), label="method")
        call = data.draw(st.integers(1, 6 * often), label="call")
        action = data.draw(st.sampled_from([request_stop, ask]), label="signals")
        with pytest.MonkeyPatch.context() as patched:
            stopping(patched, cls, method, call, action)
            resumed = run(folder, "parts") if resumed is None else holdfast.train(resume=folder / "parts")
    assert holdfast.train(resume=folder / "parts").finished
    assert apart(full_run.folder, folder / "parts") == []


def test_teachers_memory_is_restored_on_resume(tmp_path, monkeypatch):
    teachers = " + ".join(f"{run(tmp_path, name, seed=seed).folder}" for name, seed in (("a", 1), ("b", 2)))
    full_run = run(tmp_path, "whole", trainer__teachers=teachers)
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 3, ask)
        parts = run(tmp_path, "parts", trainer__teachers=teachers)
    holdfast.train(resume=parts.folder)
    assert apart(full_run.folder, parts.folder) == []
    manifest = json.loads((parts.folder / "checkpoints" / "latest" / "checkpoint.json").read_text())
    assert "live_memories.safetensors" in manifest["files"]


def test_an_error_in_an_update_loses_no_complete_iteration(full_run, tmp_path, monkeypatch):

    def fail():
        raise CrashError

    stopping(monkeypatch, Learner, "_minibatch_step", 7, fail)
    with pytest.raises(CrashError):
        run(tmp_path, "parts")
    holdfast.train(resume=tmp_path / "parts")
    assert apart(full_run.folder, tmp_path / "parts") == []


def test_resuming_a_finished_run_evaluates_it_again_and_changes_nothing(tmp_path, capsys):
    made = run(tmp_path)
    before = lines_of(made.folder)
    again = holdfast.train(resume=made.folder)
    assert "; it is finished: to train longer, set trainer.total_timesteps=N" in capsys.readouterr().out
    assert again.finished
    assert lines_of(made.folder) == before
    assert again.checkpoint == made.checkpoint


def test_resume_with_more_total_timesteps_trains_longer(tmp_path, capsys):
    made = run(tmp_path)
    longer = holdfast.train(None, {"trainer.total_timesteps": 512}, resume=made.folder)
    assert [line["iteration"] for line in lines_of(made.folder)] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert longer.checkpoint.name == "000008"
    assert json.loads((made.folder / "config.json").read_text())["trainer"]["total_timesteps"] == 512
    output = capsys.readouterr().out
    assert "resumes after iteration 6 of 8, step 384, from 000006\n" in output
    assert "changed: trainer.total_timesteps 384 → 512, schedules now run to the new end\n" in output
    assert (made.folder / "command.txt").read_text().count("command: ") == 2


def test_metrics_after_the_checkpoint_are_truncated_and_logged_again(tmp_path):
    made = run(tmp_path, trainer__total_timesteps=320)
    shutil.rmtree(made.folder / "checkpoints" / "000005")
    with (made.folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "half a li')
    holdfast.train(resume=made.folder)
    assert [line["iteration"] for line in lines_of(made.folder)] == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("arg", "message"),
    [
        (
            "seed=5",
            "seed=5 cannot change in a resumed run: it is 0. Leave it out, or start a new run.",
        ),
        ("world.delay=7", "world.delay=7 cannot change"),
        ("policy.hidden_size=9", "policy.hidden_size=9 cannot change"),
        ("trainer.batch_size=128", "trainer.batch_size=128 cannot change"),
        ("trainer.optimizer.name=muon", "trainer.optimizer.name=muon cannot change"),
        ("trainer.total_timesteps=64", "trainer.total_timesteps=64 is less than "),
        ("trainer.totl_timesteps=64", "did you mean trainer.total_timesteps?"),
        ("n_back", "resumes with its own config; leave out the recipe 'n_back'."),
    ],
)
def test_keys_that_cannot_change_on_resume_are_refused_and_nothing_is_touched(tmp_path, capsys, arg, message):
    made = run(tmp_path)
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", str(made.folder), arg]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert before == {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}


def test_kernel_may_change_on_resume_and_saved_kernel_plans_are_loaded(tmp_path, capsys):
    made = run(tmp_path)
    plan = {"a chip": {"a job": [16, 32, 4, 128, 0, 1]}}
    sign(made.checkpoint, environment={**environment(torch.device("cpu")), "kernels": plan})
    capsys.readouterr()
    kernels._plans.clear()
    assert main(["train", "--resume", str(made.folder), "policy.kernel=torch"]) == 0
    output = capsys.readouterr().out
    assert "changed: policy.kernel auto → torch" in output
    assert "not bit-exact" not in output
    assert kernels.all_plans() == plan
    kernels._plans.clear()


@pytest.mark.parametrize("form", [["--resume"], ["--resume="], ["--resume", "a", "--resume", "b"]])
def test_resume_needs_exactly_one_folder(capsys, form):
    assert main(["train", *form]) == 2
    assert "Write --resume with one run's folder, for example: --resume runs/NAME." in capsys.readouterr().err


def test_resume_of_a_folder_that_is_not_a_run_is_refused(tmp_path, capsys):
    assert main(["train", f"--resume={tmp_path}/missing"]) == 2
    assert "no such folder; give a run's folder, for example runs/NAME." in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "holds no checkpoint; has the run saved one?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    made = run(tmp_path)
    capsys.readouterr()
    assert main(["train", "--resume", f"{made.folder}/checkpoints/latest"]) == 2
    assert f"it is one: give the run's folder, {made.folder}." in capsys.readouterr().err


def test_other_versions_are_reported_as_not_bit_exact(tmp_path, capsys):
    made = run(tmp_path)
    saved = {
        "torch": "2.0",
        "threads": torch.get_num_threads(),
        "device": "cpu",
        "machine": environment(torch.device("cpu"))["machine"],
    }
    sign(made.checkpoint, environment=saved)
    capsys.readouterr()
    holdfast.train(resume=made.folder)
    assert f"not bit-exact: torch 2.0 → {torch.__version__}." in capsys.readouterr().out


class UnsavableWorld:
    """A world without saved state; records the seeds it is made with."""

    def __init__(self, agents, seed):
        self._world = holdfast.make_world("recall", agents=agents, seed=seed)
        self.agents, self.spec = agents, self._world.spec
        SEEDS.append(seed)

    def reset(self):
        return self._world.reset()

    def step(self, actions):
        return self._world.step(actions)


SEEDS = []


def test_a_world_without_saved_state_starts_new_episodes_with_memory_cleared(tmp_path, monkeypatch, capsys):
    keys = {"world": "test_resume:UnsavableWorld", "world.delay": None}
    KINDS["unsavable"] = keys
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 4, ask)
        parts = start(tmp_path, "parts", "unsavable", **{"memory.clear_on": "never"})
    SEEDS.clear()
    capsys.readouterr()
    states = []
    real = Collector.rollout

    def record(self, version):
        if version == 3:
            states.append((self.next_step.first.all(), self.policy.store.view(0)["h"].abs().max()))
        return real(self, version)

    monkeypatch.setattr(Collector, "rollout", record)
    holdfast.train(resume=parts.folder)
    output = capsys.readouterr().out
    assert output.count("8 of 8 agents start a new episode, with memory cleared.") == 1
    assert states == [(True, 0.0)]
    # Other episodes than those at the start of the run.
    assert SEEDS[0] != 0


def test_cli_prints_the_resume_command_and_resumes(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 2, ask)
        assert main(words(tmp_path)) == 1
    assert f"stopped; resume with: holdfast train --resume {tmp_path}/x" in capsys.readouterr().out
    assert main(["train", "--resume", f"{tmp_path}/x"]) == 0
    assert "greedy return" in capsys.readouterr().out


def test_trackers_of_a_resumed_run_have_every_step_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = run(tmp_path, tensorboard="on")
    shutil.rmtree(made.folder / "checkpoints" / "000006")
    holdfast.train(resume=made.folder)
    events = EventAccumulator(str(made.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("losses/entropy")] == [64, 128, 192, 256, 320, 384]


def test_a_teachers_run_may_continue_or_be_deleted_before_resume(tmp_path, monkeypatch):
    teacher = run(tmp_path, "teacher", seed=1)
    keys = {"trainer__teachers": str(teacher.folder)}
    full_run = run(tmp_path, "whole", **keys)
    for name in ("continued", "deleted"):
        with monkeypatch.context() as patched:
            stopping(patched, Collector, "rollout", 3, ask)
            parts = run(tmp_path, name, **keys)
        if name == "continued":
            holdfast.train(None, {"trainer.total_timesteps": 640}, resume=teacher.folder)
        else:
            shutil.rmtree(teacher.folder)
        assert holdfast.train(resume=parts.folder).finished
        assert apart(full_run.folder, parts.folder) == []
        if name == "continued":
            shutil.rmtree(teacher.folder)
            teacher = run(tmp_path, "teacher", seed=1)


def test_teachers_memory_is_restored_into_other_slices(tmp_path, monkeypatch):
    teacher = run(tmp_path, "teacher", seed=1)
    keys = {"trainer__teachers": str(teacher.folder), "trainer__minibatch_size": 16}
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 3, ask)
        parts = run(tmp_path, "parts", **keys)
    assert holdfast.train(None, {"trainer.minibatch_size": 32}, resume=parts.folder).finished


def test_the_returned_policy_of_a_stopped_run_is_the_saved_one(tmp_path, monkeypatch):
    stopping(monkeypatch, Learner, "_minibatch_step", 6, ask)
    made = run(tmp_path)
    saved = load_file(made.checkpoint / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in made.policy.state_dict().items())


def test_resume_reads_checkpoints_only_after_locking_the_run(tmp_path, monkeypatch):
    made, calls = run(tmp_path), []
    real_newest, real_locked = RunDir.newest, RunDir.locked

    @contextmanager
    def locked(self):
        with real_locked(self):
            calls.append("locked")
            yield

    def newest(self, log):
        calls.append("newest")
        return real_newest(self, log)

    monkeypatch.setattr(RunDir, "locked", locked)
    monkeypatch.setattr(RunDir, "newest", newest)
    holdfast.train(resume=made.folder)
    assert calls == ["locked", "newest"]


def fields_of(tree):
    """Yield every branch of a saved tree with each of its keys."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in list(keys):
        yield tree, key
        yield from fields_of(tree[key])


@pytest.mark.parametrize("name", ["trainer", "memories", "world"])
def test_a_state_without_any_one_field_is_refused_in_one_line(tmp_path, name):
    config = override(find_recipe("recall"), {**TINY, "trainer.stale": "burn_in", "trainer.burn_in": 2})
    world = build_world(config, torch.device("cpu"), agents=8, seed=0)
    trainer = Trainer(config, world, build_policy(config, world, torch.device("cpu")))
    list(iterate(trainer, 1))
    saved = write_checkpoint(tmp_path, trainer.snapshot(None, {}), {"config.json": b"{}"}, {})
    saved, messages = open_checkpoint(saved), []
    full_state = getattr(saved, name)()
    for number in range(len(list(fields_of(full_state)))):
        tree = copy.deepcopy(full_state)
        branch, key = list(fields_of(tree))[number]
        if isinstance(branch[key], list | tuple):
            branch[key] = type(branch[key])()
        else:
            del branch[key]
        changed = type("Changed", (Checkpoint,), {name: lambda self, tree=tree: tree})(**vars(saved))
        try:
            trainer.restore(changed)
        except CorruptFileError as error:
            messages.append(str(error))
    assert messages
    assert all("\n" not in message and message.startswith(f"{saved.path}") for message in messages)
    trainer.restore(saved)
