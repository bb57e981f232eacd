"""A run that was interrupted goes on as if it had never been: every number is the same, bit for bit."""

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
from holdfast import resume
from holdfast.cli import main
from holdfast.experience import Collector
from holdfast.keep import RunFolder, made_with
from holdfast.learn import Learner
from holdfast.memory.kernels import choices as kernels
from holdfast.policies import Fast
from holdfast.report import RunConsole
from kept import TINY, apart, lines_of, run, words

pytestmark = pytest.mark.usefixtures("annotations_asleep")


class Dropping(Fast):
    """Draws from torch's own generator in every call."""

    def encode(self, obs):
        return nn.functional.dropout(super().encode(obs), 0.1)


class Sums(gymnasium.Env):
    """An episode of drawn numbers; what the last action was comes back."""

    observation_space = spaces.Box(-10, 10, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._left = int(self.np_random.integers(2, 6))
        return self._seen(0), {}

    def step(self, action):
        self._left -= 1
        return self._seen(action), float(action), self._left == 0, False, {}

    def _seen(self, action):
        return np.array([self.np_random.normal(), action, self._left], np.float32)


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
    "draws": {"policy": "test_resume:Dropping", "trainer.check": "off"},
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
        "world": "pettingzoo:zoo_envs:Guests",
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


def begin(folder, name, kind, **more):
    whole = {**TINY, "runs_dir": str(folder), "run": name, **keys_of(kind), **more}
    return holdfast.train(None, {key: value for key, value in whole.items() if value is not None})


class Stopped(BaseException):
    """The lights go out."""


def stopping(monkeypatch, where, what, after, how):
    """Let something happen in the call of a method after some others."""
    real, calls = getattr(where, what), []

    def called(*given, **named):
        calls.append(1)
        if len(calls) == after:
            how()
        return real(*given, **named)

    monkeypatch.setattr(where, what, called)


def ask():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_run_goes_on_bit_for_bit(tmp_path, monkeypatch, kind):
    whole = begin(tmp_path, "whole", kind)
    with monkeypatch.context() as patched:
        # In the fourth rollout: two iterations after the last checkpoint that is due, one after a boundary.
        stopping(patched, Collector, "rollout", 4, ask)
        parts = begin(tmp_path, "parts", kind)
    assert not parts.finished
    assert parts.checkpoint.name == "000003"
    gone_on = holdfast.train(resume=parts.folder)
    assert gone_on.finished
    assert apart(whole.folder, parts.folder) == []
    assert {k: v for k, v in whole.metrics.items() if k.startswith("eval/")} == {
        k: v for k, v in gone_on.metrics.items() if k.startswith("eval/")
    }


MOMENTS = [
    (Collector, "_live_one_step", 8),
    (Learner, "_learn_from", 2),
    (Learner, "refresh", 1),
    (Collector, "rollout", 1),
    (RunConsole, "show", 1),
    (RunFolder, "sizes", 1),
]


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_wherever_it_is_interrupted_and_however_often(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("runs")
    whole, resumed = run(folder, "whole"), None
    for _ in range(data.draw(st.integers(1, 3), label="interruptions")):
        where, what, often = data.draw(st.sampled_from(MOMENTS), label="where")
        after = data.draw(st.integers(1, 6 * often), label="call")
        with pytest.MonkeyPatch.context() as patched:
            stopping(patched, where, what, after, ask)
            resumed = run(folder, "parts") if resumed is None else holdfast.train(resume=folder / "parts")
    assert holdfast.train(resume=folder / "parts").finished
    assert apart(whole.folder, folder / "parts") == []


def test_a_run_that_is_taught_goes_on_with_what_its_teachers_remember(tmp_path, monkeypatch):
    teachers = " + ".join(f"{run(tmp_path, name, seed=seed).folder}" for name, seed in (("a", 1), ("b", 2)))
    whole = run(tmp_path, "whole", trainer__teachers=teachers)
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 3, ask)
        parts = run(tmp_path, "parts", trainer__teachers=teachers)
    holdfast.train(resume=parts.folder)
    assert apart(whole.folder, parts.folder) == []
    memories = json.loads((parts.folder / "checkpoints" / "latest" / "checkpoint.json").read_text())
    assert "live_memories.safetensors" in memories["files"]


def test_an_error_in_the_middle_costs_nothing_that_was_lived(tmp_path, monkeypatch):
    whole = run(tmp_path, "whole")

    def fail():
        raise Stopped

    stopping(monkeypatch, Learner, "_learn_from", 7, fail)
    with pytest.raises(Stopped):
        run(tmp_path, "parts")
    holdfast.train(resume=tmp_path / "parts")
    assert apart(whole.folder, tmp_path / "parts") == []


def test_a_finished_run_is_evaluated_again_and_stays_as_it_was(tmp_path, capsys):
    made = run(tmp_path)
    before = lines_of(made.folder)
    again = holdfast.train(resume=made.folder)
    assert "; it is finished: for longer, give trainer.total_timesteps=N" in capsys.readouterr().out
    assert again.finished
    assert lines_of(made.folder) == before
    assert again.checkpoint == made.checkpoint


def test_a_run_goes_on_for_longer_than_it_was_to(tmp_path, capsys):
    made = run(tmp_path)
    longer = holdfast.train(None, {"trainer.total_timesteps": 512}, resume=made.folder)
    assert [line["iteration"] for line in lines_of(made.folder)] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert longer.checkpoint.name == "000008"
    assert json.loads((made.folder / "config.json").read_text())["trainer"]["total_timesteps"] == 512
    said = capsys.readouterr().out
    assert "goes on after iteration 6 of 8, step 384, from 000006\n" in said
    assert (
        "changed: trainer.total_timesteps 384 → 512, what is scheduled now goes on to the new end\n" in said
    )
    assert (made.folder / "command.txt").read_text().count("command: ") == 2


def test_what_was_measured_after_the_checkpoint_is_cut_and_measured_again(tmp_path):
    made = run(tmp_path, trainer__total_timesteps=320)
    shutil.rmtree(made.folder / "checkpoints" / "000005")
    with (made.folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "half a li')
    holdfast.train(resume=made.folder)
    assert [line["iteration"] for line in lines_of(made.folder)] == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        (
            "seed=5",
            "seed=5 cannot be changed in a run that goes on: it is 0. Leave it out, or begin a new run.",
        ),
        ("world.delay=7", "world.delay=7 cannot be changed"),
        ("policy.hidden_size=9", "policy.hidden_size=9 cannot be changed"),
        ("trainer.batch_size=128", "trainer.batch_size=128 cannot be changed"),
        ("trainer.optimizer.name=muon", "trainer.optimizer.name=muon cannot be changed"),
        ("trainer.total_timesteps=64", "trainer.total_timesteps=64 is less than "),
        ("trainer.totl_timesteps=64", "did you mean trainer.total_timesteps?"),
        ("n_back", "goes on by the config it has; leave out the recipe 'n_back'."),
    ],
)
def test_what_cannot_change_is_told_and_nothing_is_touched(tmp_path, capsys, word, told):
    made = run(tmp_path)
    before = {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert main(["train", "--resume", str(made.folder), word]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert said.err.count("\n") == 1
    assert before == {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}


def test_what_runs_the_memory_can_be_another_and_choices_of_kernels_are_adopted(tmp_path, capsys):
    from keep.test_checkpoint import sign

    made = run(tmp_path)
    plan = {"a chip": {"a job": [16, 32, 4, 128, 0, 1]}}
    sign(made.checkpoint, made_with={**made_with(torch.device("cpu")), "kernels": plan})
    capsys.readouterr()
    kernels.forget()
    assert main(["train", "--resume", str(made.folder), "policy.kernel=torch"]) == 0
    said = capsys.readouterr()
    assert "changed: policy.kernel auto → torch" in said.out
    assert "not bit-exact" not in said.out
    assert kernels.all_chosen() == plan
    kernels.forget()


@pytest.mark.parametrize("form", [["--resume"], ["--resume="], ["--resume", "a", "--resume", "b"]])
def test_resume_wants_one_folder(capsys, form):
    assert main(["train", *form]) == 2
    assert "Write --resume with one run's folder, for example: --resume runs/NAME." in capsys.readouterr().err


def test_a_folder_that_is_no_run_is_told(tmp_path, capsys):
    assert main(["train", f"--resume={tmp_path}/nobody"]) == 2
    assert "there is no such folder; give a run's, for example runs/NAME." in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "holds no checkpoint; has the run saved one?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    made = run(tmp_path)
    capsys.readouterr()
    assert main(["train", "--resume", f"{made.folder}/checkpoints/latest"]) == 2
    assert f"it is one: give the run's folder, {made.folder}." in capsys.readouterr().err


def test_other_versions_and_threads_are_told_as_not_bit_exact(tmp_path, capsys):
    from keep.test_checkpoint import sign

    made = run(tmp_path)
    told = {
        "torch": "2.0",
        "threads": torch.get_num_threads(),
        "device": "cpu",
        "machine": made_with(torch.device("cpu"))["machine"],
    }
    sign(made.checkpoint, made_with=told)
    capsys.readouterr()
    holdfast.train(resume=made.folder)
    assert f"not bit-exact: torch 2.0 → {torch.__version__}." in capsys.readouterr().out


class Forgetful:
    """A world that cannot say where it is; it tells how often it was made, and by which seed."""

    def __init__(self, agents, seed):
        self._world = holdfast.make_world("recall", agents=agents, seed=seed)
        self.agents, self.spec = agents, self._world.spec
        SEEDS.append(seed)

    def reset(self):
        return self._world.reset()

    def step(self, actions):
        return self._world.step(actions)


SEEDS = []


def test_a_world_that_cannot_be_put_back_begins_anew_with_memories_cleared(tmp_path, monkeypatch, capsys):
    keys = {"world": "test_resume:Forgetful", "world.delay": None}
    KINDS["forgetful"] = keys
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 4, ask)
        parts = begin(tmp_path, "parts", "forgetful", **{"memory.clear_on": "never"})
    SEEDS.clear()
    capsys.readouterr()
    seen = []
    real = Collector.rollout

    def looked(self, version):
        if version == 3:
            seen.append((self.pending.first.all(), self.policy.store.live(0)["h"].abs().max()))
        return real(self, version)

    monkeypatch.setattr(Collector, "rollout", looked)
    holdfast.train(resume=parts.folder)
    said = capsys.readouterr().out
    assert said.count("8 of 8 agents begin a new episode, with their memories cleared.") == 1
    assert seen == [(True, 0.0)]
    # Not the episodes again that it began with.
    assert SEEDS[0] != 0


def test_the_command_line_says_how_to_go_on_and_goes_on(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 2, ask)
        assert main(words(tmp_path)) == 1
    said = capsys.readouterr().out
    assert "stopping; the last whole iteration is saved." in said
    assert f"stopped; it goes on by: holdfast train --resume {tmp_path}/x" in said
    assert main(["train", "--resume", f"{tmp_path}/x"]) == 0
    assert "greedy return" in capsys.readouterr().out


def test_a_tracker_of_a_run_that_goes_on_has_every_step_once(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = run(tmp_path, tensorboard="on")
    shutil.rmtree(made.folder / "checkpoints" / "000006")
    holdfast.train(resume=made.folder)
    events = EventAccumulator(str(made.folder / "tensorboard"))
    events.Reload()
    assert [each.step for each in events.Scalars("losses/entropy")] == [64, 128, 192, 256, 320, 384]


def test_a_teacher_may_go_on_or_go_away_meanwhile(tmp_path, monkeypatch):
    teacher = run(tmp_path, "teacher", seed=1)
    keys = {"trainer__teachers": str(teacher.folder)}
    whole = run(tmp_path, "whole", **keys)
    for name in ("on", "away"):
        with monkeypatch.context() as patched:
            stopping(patched, Collector, "rollout", 3, ask)
            parts = run(tmp_path, name, **keys)
        if name == "on":
            holdfast.train(None, {"trainer.total_timesteps": 640}, resume=teacher.folder)
        else:
            shutil.rmtree(teacher.folder)
        assert holdfast.train(resume=parts.folder).finished
        assert apart(whole.folder, parts.folder) == []
        if name == "on":
            shutil.rmtree(teacher.folder)
            teacher = run(tmp_path, "teacher", seed=1)


def test_a_teachers_memories_may_lie_in_other_slices(tmp_path, monkeypatch):
    teacher = run(tmp_path, "teacher", seed=1)
    keys = {"trainer__teachers": str(teacher.folder), "trainer__minibatch_size": 16}
    with monkeypatch.context() as patched:
        stopping(patched, Collector, "rollout", 3, ask)
        parts = run(tmp_path, "parts", **keys)
    assert holdfast.train(None, {"trainer.minibatch_size": 32}, resume=parts.folder).finished


def test_a_policy_that_was_stopped_is_the_one_that_was_saved(tmp_path, monkeypatch):
    stopping(monkeypatch, Learner, "_learn_from", 6, ask)
    made = run(tmp_path)
    saved = load_file(made.checkpoint / "model.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in made.policy.state_dict().items())


def test_where_to_go_on_is_looked_for_when_nobody_else_can_save_any_more(tmp_path, monkeypatch):
    made, looked = run(tmp_path), []
    real_find, real_lock = resume.RunFolder.newest, resume.RunFolder.locked

    @contextmanager
    def locked(self):
        with real_lock(self):
            looked.append("locked")
            yield

    def newest(self, say):
        looked.append("looked")
        return real_find(self, say)

    monkeypatch.setattr(resume.RunFolder, "locked", locked)
    monkeypatch.setattr(resume.RunFolder, "newest", newest)
    holdfast.train(resume=made.folder)
    assert looked == ["locked", "looked"]
