"""Whole runs with all that the trainer has: NaN, checkpoints, teachers, traces, trackers, repetition."""

import io
import itertools
import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rich.console import Console
from safetensors.torch import load_file

import holdfast
from holdfast.cli import main
from holdfast.errors import ConfigError, ContractError
from holdfast.experience.finite import NotFiniteError
from holdfast.learn import Learner, Lesson
from holdfast.policies import Fast
from holdfast.report import METRICS, RunConsole, Tell

TINY = {
    "world.agents": 16,
    "world.delay": "2..5",
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 256,
    "trainer.minibatch_size": 64,
    "trainer.total_timesteps": 1024,
    "trainer.eval_episodes": 20,
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
}


def run(tmp_path, recipe="recall", **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    return holdfast.train(recipe, {**TINY, "runs_dir": str(tmp_path), **keys})


def words(tmp_path, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    return ["train", "recall", *(f"{k}={v}" for k, v in {**TINY, "runs_dir": tmp_path, **keys}.items())]


def lines_of(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def untimed(line):
    return {name: number for name, number in line.items() if METRICS[name.partition("@")[0]].kind != "time"}


def latest(folder):
    return load_file(folder / "checkpoints" / "latest" / "model.safetensors")


FULL = {
    "trainer__sampling__method": "prioritized",
    "trainer__stale": "burn_in",
    "trainer__burn_in": 4,
    "trainer__update_epochs": 3,
    "trainer__refresh": "epoch",
    "trainer__accumulate": 2,
    "trainer__ppo__advantage": "vtrace",
    "trainer__ppo__target_kl": 0.05,
    "trainer__ppo__l2_init": 1e-4,
    "trainer__ppo__l2_reg": 1e-5,
    "trainer__clip_range": 5.0,
    "trainer__optimizer__name": "muon",
    "trainer__analyze_weights_interval": 2,
    "trainer__monitor": "every:2",
    "schedule__trainer__ppo__clip_coef": "cosine:0.05",
}


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """One run with everything on."""
    return run(tmp_path_factory.mktemp("runs"), run="full", **FULL)


def test_a_run_with_everything_on_measures_every_number_but_those_of_teachers_and_gpus(full):
    found = {name.partition("@")[0] for line in lines_of(full.folder) for name in line}
    found |= {name for line in lines_of(full.folder, "machine.jsonl") for name in line}
    absent = METRICS.keys() - found
    assert {name for name in absent if not name.startswith(("machine/gpu", "losses/teacher"))} == set()
    assert all(line["memory/replay_error"] <= 1e-4 for line in lines_of(full.folder)[:-1])
    for line in lines_of(full.folder)[:-1]:
        assert line["memory/resets"] == line["memory/resets_due"]


@pytest.mark.parametrize("more", [{}, FULL, {"trainer__stale": "recompute", "trainer__update_epochs": 2}])
def test_the_same_seed_twice_is_the_same_file_but_for_times(tmp_path, more):
    one, other = (run(tmp_path / name, seed=5, **more) for name in ("a", "b"))
    mine, theirs = ([json.dumps(untimed(line)) for line in lines_of(each.folder)] for each in (one, other))
    assert mine == theirs
    assert len(mine) == 5
    third = run(tmp_path / "c", seed=6, **more)
    assert [json.dumps(untimed(line)) for line in lines_of(third.folder)] != mine


class Poisonous(gymnasium.Env):
    """Shows or pays NaN in its eighteenth step, if its agent is the third."""

    observation_space = spaces.Box(-1, 1, (3,))
    action_space = spaces.Discrete(2)
    made = 0

    def __init__(self, what="obs"):
        self.what, self.number, self.steps = what, type(self).made % 4, 0
        type(self).made += 1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.steps += 1
        bad = float("nan") if self.number == 2 and self.steps == 18 else 0.0
        seen = np.full(3, bad if self.what == "obs" else 0.0, np.float32)
        return seen, bad if self.what == "reward" else 0.0, self.steps % 5 == 0, False, {}


STORIES = {
    "obs": "agent 2 sees something that is not finite",
    "reward": "agent 2 got a reward that is not finite",
}


@pytest.mark.parametrize("what", STORIES)
def test_nan_from_the_world_stops_the_run_with_its_name_the_step_and_the_agent(tmp_path, what):
    Poisonous.made = 0
    keys = {
        "world": "test_runs_in_full:Poisonous",
        "world.options": f"{{what: {what}}}",
        "world.agents": 4,
        "trainer.bptt_horizon": 8,
        "trainer.batch_size": 32,
        "trainer.minibatch_size": 32,
        "trainer.total_timesteps": 320,
        "trainer.checkpoint_interval": 1,
        "policy.hidden_size": 8,
        "runs_dir": str(tmp_path),
        "run": "nan",
    }
    with pytest.raises(ContractError) as caught:
        holdfast.train(None, keys)
    assert f"step 18: {STORIES[what]}" in str(caught.value)
    # Two whole iterations of 8 steps were learnt from; what they left is whole.
    assert len(lines_of(tmp_path / "nan")) == 2
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def poison_weights(monkeypatch, at):
    """Let a weight become NaN after so many updates."""
    told = Learner.refresh

    def poisoned(self, segments, collector, knobs=None):
        found = told(self, segments, collector, knobs)
        if int(segments.version[0]) == at:
            with torch.no_grad():
                self.policy.lstm.cell.rnn.weight_hh_l0[2, 3] = float("nan")
        return found

    monkeypatch.setattr(Learner, "refresh", poisoned)


def test_nan_in_weights_stops_the_run_and_the_last_good_checkpoint_stays(tmp_path, monkeypatch, capsys):
    poison_weights(monkeypatch, at=2)
    assert main(words(tmp_path, run="nan", trainer__checkpoint_interval=2)) == 1
    told = capsys.readouterr()
    assert told.err.startswith("holdfast: step 48: weights are not finite: lstm.cell.rnn.weight_hh_l0 (1 of ")
    assert told.err.count("\n") == 1
    good = tmp_path / "nan" / "checkpoints" / "000002"
    assert f"weights that are not finite are not saved; the last good ones are {good}" in told.out
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve() == good.resolve()
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def test_nan_before_anything_was_saved_saves_the_last_good_weights(tmp_path, monkeypatch):
    poison_weights(monkeypatch, at=2)
    with pytest.raises(NotFiniteError):
        run(tmp_path, run="nan")
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve().name == "000002"
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def test_nan_from_the_start_leaves_the_weights_it_started_with(tmp_path, monkeypatch):
    poison_weights(monkeypatch, at=0)
    with pytest.raises(NotFiniteError):
        run(tmp_path, run="nan")
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve().name == "000000"
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


class OverflowingFast(Fast):
    """Says something that no gradient survives, after a while."""

    def decode(self, features):
        thoughts = super().decode(features)
        if torch.is_grad_enabled():
            rows = torch.arange(len(thoughts.values)) < 8
            # 0 in value, and 1/0 in its derivative: only gradients notice.
            nothing = torch.where(rows, (thoughts.values - thoughts.values.detach()).abs().sqrt(), 0.0)
            return thoughts._replace(values=thoughts.values + nothing)
        return thoughts


def test_a_gradient_that_is_not_finite_is_told_with_tensor_minibatch_and_agents(tmp_path):
    with pytest.raises(NotFiniteError) as caught:
        run(tmp_path, run="nan", policy="test_runs_in_full:OverflowingFast")
    told = str(caught.value)
    assert told.startswith("iteration 1, epoch 1, minibatch 1: not finite: the gradient of ")
    assert "; agent" in told
    assert told.endswith("the weights are those before this minibatch.")
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def test_weights_are_saved_now_and_then_and_at_the_end(tmp_path):
    made = run(tmp_path, trainer__total_timesteps=1280, trainer__checkpoint_interval=2)
    names = sorted(path.name for path in (made.folder / "checkpoints").iterdir())
    assert names == ["000002", "000004", "000005", "best", "latest"]
    assert made.checkpoint.name == "000005"
    even = run(tmp_path, trainer__total_timesteps=1024, trainer__checkpoint_interval=2)
    names = sorted(path.name for path in (even.folder / "checkpoints").iterdir())
    assert names == ["000000", "000002", "000004", "best", "latest"]


def test_a_run_is_taught_by_other_runs(tmp_path):
    teacher, other = (run(tmp_path, run=name, seed=seed) for name, seed in (("teacher", 1), ("other", 2)))
    told = f"{teacher.folder} action=2 steps=700 anneal=0.5 + {other.folder}"
    taught = run(tmp_path, run="taught", trainer__teachers=told)
    lines = lines_of(taught.folder)[:-1]
    assert all(line["losses/teacher_action@other"] > 0 for line in lines)
    # 256 steps an iteration: after three of them the first teacher is no longer heard.
    assert ["losses/teacher_action@teacher" in line for line in lines] == [True, True, True, False]


def test_what_is_no_teacher_is_told_before_anything_trains(tmp_path):
    for given, line in (
        ("runs/nobody", "trainer.teachers: runs/nobody is no run's folder; give for example runs/NAME."),
        ("runs/nobody acton=2", "there is no acton; did you mean action?"),
        ("runs/nobody +", "'+' is not key=value"),
    ):
        with pytest.raises(ConfigError) as caught:
            run(tmp_path, trainer__teachers=given)
        assert line in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_life_of_one_agent_is_told_from_the_run(tmp_path, capsys):
    assert main([*words(tmp_path, run="told"), "--trace=3"]) == 0
    said = capsys.readouterr().out
    file = (tmp_path / "told" / "trace.txt").read_text()
    for text in (said, file):
        assert "Agent 3 · rollout 1 · steps 0-15 · weights of version 0" in text
        assert "memory comes in as zeros" in text
        assert "values kept, |state| " in text
        assert "Update · weights changed: version 0 → 1" in text
        assert "env_obs" in text
    assert "agent 3 lives on in " in said
    assert "rollout 4" in file
    assert "rollout 4" not in said


def test_nobody_else_can_be_traced(tmp_path, capsys):
    assert main([*words(tmp_path), "--trace"]) == 2
    assert "There is no agent 42 to trace; there are agents 0 to 15" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_cannot_be_opened_leaves_no_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    assert main(words(tmp_path / "runs", run="lost", wandb="online")) == 2
    told = capsys.readouterr().err
    assert told.startswith("holdfast: wandb does not open: ")
    assert told.endswith("Type wandb=off to go without it.\n")
    assert ".." not in told
    assert not (tmp_path / "runs" / "lost").exists()


def test_advice_is_given_where_memory_is_used_and_nowhere_else():
    said = []
    board = RunConsole(1, Console(file=io.StringIO()))
    board.say = said.append
    tell = Tell(board, 64)
    tell.saw({"memory/gradient_reach": 10}, "")
    tell.advise({})
    tell.advise({"eval/return_mean": 0.25, "eval/return_mean_memory_cleared": 0.25})
    assert said == []
    tell.advise({"eval/return_mean": 0.9, "eval/return_mean_memory_cleared": 0.25})
    assert said == ["80 % of the gradient lies within 10 of 64 steps: a trainer.bptt_horizon of 16 would do."]


def test_trackers_mirror_every_line_of_a_run(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = run(tmp_path, run="seen", tensorboard="on")
    events = EventAccumulator(str(made.folder / "tensorboard"))
    events.Reload()
    returns = [each.value for each in events.Scalars("charts/episodic_return")]
    assert returns == pytest.approx([line["charts/episodic_return"] for line in lines_of(made.folder)[:-1]])
    assert events.Scalars("eval/return_mean")[0].value == pytest.approx(made.metrics["eval/return_mean"])


def test_weights_that_end_as_nan_are_no_success(tmp_path, monkeypatch, capsys):
    poison_weights(monkeypatch, at=3)
    assert main(words(tmp_path, run="nan", trainer__checkpoint_interval=2)) == 1
    told = capsys.readouterr()
    assert told.err.startswith("holdfast: after iteration 4: weights are not finite: ")
    assert "greedy return" not in told.out
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve().name == "000003"


def test_teachers_whose_folders_are_called_alike_are_both_heard(tmp_path):
    folders = [run(tmp_path / name, run="x", seed=seed).folder for name, seed in (("a", 1), ("b", 2))]
    told = " + ".join(map(str, folders))
    taught = run(tmp_path, trainer__teachers=told)
    assert {"losses/teacher_action@x", "losses/teacher_action@x-2"} <= taught.metrics.keys()


def test_a_teacher_that_does_not_know_an_action_says_so(tmp_path, capsys):
    teacher = run(tmp_path, run="two", world__cues=2)
    capsys.readouterr()
    run(tmp_path, world__cues=4, trainer__teachers=str(teacher.folder))
    said = capsys.readouterr().out
    assert "teacher two does not know " in said
    run(tmp_path, world__cues=2, trainer__teachers=str(teacher.folder))
    assert "does not know" not in capsys.readouterr().out


@pytest.mark.parametrize(("key", "value"), [("trainer__ppo__l2_reg", 1e38), ("teacher", float("nan"))])
def test_what_is_not_finite_beside_the_policy_is_named_too(tmp_path, key, value, monkeypatch):
    teacher = run(tmp_path, run="teacher").folder
    more = {key: value}
    if key == "teacher":
        more = {"trainer__teachers": str(teacher)}
        monkeypatch.setattr(Lesson, "_answer", poisoned(Lesson._answer))
    with pytest.raises(NotFiniteError) as caught:
        run(tmp_path, **more)
    # The square is large, but finite: what its weight makes of it is not.
    squares = "the loss, of terms that are: a weight of theirs is too large"
    expected = "values of teacher teacher is not finite" if key == "teacher" else squares
    assert expected in str(caught.value)


def poisoned(answer):
    def said(self, steps, start):
        told, values = answer(self, steps, start)
        return told, values * float("nan")

    return said


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_compiled_policies_are_monitored_too(tmp_path):
    made = run(tmp_path, policy__compile=True, trainer__total_timesteps=256)
    assert made.metrics["memory/gradient_reach"] >= 1


def test_times_add_up_to_all_the_time_that_passed(tmp_path):
    made = run(tmp_path, trainer__checkpoint_interval=1, trainer__analyze_weights_interval=1)
    lines = lines_of(made.folder)[:-1]
    for before, line in itertools.pairwise([{"seconds": 0.0}, *lines]):
        parts = sum(number for name, number in line.items() if name.startswith("time/"))
        assert parts == pytest.approx(line["seconds"] - before["seconds"], rel=1e-6, abs=1e-9)
        assert line["charts/SPS"] == pytest.approx(256 / parts, rel=1e-6)


def test_what_was_not_counted_is_not_told(tmp_path):
    plain, warm = (
        run(tmp_path, trainer__monitor="off", trainer__stale=mode, trainer__burn_in=4)
        for mode in ("keep", "burn_in")
    )
    assert "memory/graph_bytes" not in plain.metrics
    assert warm.metrics["memory/buffer_bytes"] > plain.metrics["memory/buffer_bytes"]
