"""Complete runs with all features: NaN checks, checkpoints, teachers, traces, trackers, determinism."""

import io
import itertools
import json
import re

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
from holdfast.learn import Learner, Teacher
from holdfast.policies import Fast
from holdfast.report.console import RunConsole, RunNotices
from holdfast.report.metrics import METRICS, find_metric
from holdfast.rollout.nan_checks import NonFiniteError

TINY = {
    "world.agents": 16,
    "world.delay": "2..5",
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 256,
    "trainer.minibatch_size": 64,
    "trainer.total_timesteps": 1024,
    "report": "off",
    "trainer.eval_episodes": 20,
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
}


def run(tmp_path, recipe="recall", callbacks=(), **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    return holdfast.train(recipe, {**TINY, "runs_dir": str(tmp_path), **keys}, callbacks=callbacks)


def words(tmp_path, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    return ["train", "recall", *(f"{k}={v}" for k, v in {**TINY, "runs_dir": tmp_path, **keys}.items())]


def lines_of(folder, name="metrics.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def untimed(line):
    return {name: number for name, number in line.items() if find_metric(name).kind != "time"}


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
    """A run with every feature on."""
    callbacks = [lambda iteration: iteration.log("progress", iteration.number / iteration.total)]
    return run(tmp_path_factory.mktemp("runs"), run="full", callbacks=callbacks, **FULL)


def test_every_described_metric_is_logged_except_those_of_teachers_and_gpus(full):
    logged = {re.split("@|(?<=custom)/", name)[0] for line in lines_of(full.folder) for name in line}
    logged |= {name for line in lines_of(full.folder, "machine.jsonl") for name in line}
    absent = METRICS.keys() - logged
    assert {name for name in absent if not name.startswith(("machine/gpu", "losses/teacher"))} == set()
    assert all(line["memory/replay_error"] <= 1e-4 for line in lines_of(full.folder)[:-1])
    for line in lines_of(full.folder)[:-1]:
        assert line["memory/resets"] == line["memory/resets_due"]


# With defaults: tests/training/test_train.py.
@pytest.mark.parametrize("more", [FULL, {"trainer__stale": "recompute", "trainer__update_epochs": 2}])
def test_same_seed_gives_equal_metrics_files_except_times(tmp_path, more, annotations_asleep):
    one, other = (run(tmp_path / name, seed=5, **more) for name in ("a", "b"))
    lines, repeated = ([json.dumps(untimed(line)) for line in lines_of(run.folder)] for run in (one, other))
    assert lines == repeated
    assert len(lines) == 5
    third = run(tmp_path / "c", seed=6, **more, trainer__total_timesteps=256)
    assert json.dumps(untimed(lines_of(third.folder)[0])) != lines[0]


class NaNEnv(gymnasium.Env):
    """Gives a NaN observation or reward in step 18 of agent 2."""

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
        obs = np.full(3, bad if self.what == "obs" else 0.0, np.float32)
        return obs, bad if self.what == "reward" else 0.0, self.steps % 5 == 0, False, {}


MESSAGES = {
    "obs": "agent 2 got an observation that is not finite",
    "reward": "agent 2 got a reward that is not finite",
}


@pytest.mark.parametrize("what", MESSAGES)
def test_nan_from_the_world_stops_the_run_with_step_and_agent(tmp_path, what):
    NaNEnv.made = 0
    keys = {
        "world": "test_full_runs:NaNEnv",
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
    assert f"step 18: {MESSAGES[what]}" in str(caught.value)
    # Two complete iterations of 8 steps are saved.
    assert len(lines_of(tmp_path / "nan")) == 2
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def poison_weights(monkeypatch, at):
    """Set a weight to NaN after so many updates."""
    refresh = Learner.refresh

    def poisoned(self, segments, collector, config=None):
        metrics = refresh(self, segments, collector, config)
        if int(segments.version[0]) == at:
            with torch.no_grad():
                self.policy.lstm.cell.rnn.weight_hh_l0[2, 3] = float("nan")
        return metrics

    monkeypatch.setattr(Learner, "refresh", poisoned)


def test_nan_weights_stop_the_run_and_the_last_finite_checkpoint_stays(tmp_path, monkeypatch, capsys):
    poison_weights(monkeypatch, at=2)
    assert main(words(tmp_path, run="nan", trainer__checkpoint_interval=2)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("holdfast: step 48: weights are not finite: lstm.cell.rnn.weight_hh_l0 (1 of ")
    assert captured.err.count("\n") == 1
    good = tmp_path / "nan" / "checkpoints" / "000002"
    assert f"non-finite weights are not saved; the last finite ones are in {good}" in captured.out
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve() == good.resolve()
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def test_nan_before_the_first_checkpoint_saves_the_last_finite_weights(tmp_path, monkeypatch):
    poison_weights(monkeypatch, at=2)
    with pytest.raises(NonFiniteError):
        run(tmp_path, run="nan")
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve().name == "000002"
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def test_nan_in_the_first_iteration_saves_the_initial_weights(tmp_path, monkeypatch):
    poison_weights(monkeypatch, at=0)
    with pytest.raises(NonFiniteError):
        run(tmp_path, run="nan")
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve().name == "000000"
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


class OverflowingFast(Fast):
    """Values with infinite gradients."""

    def decode(self, features):
        output = super().decode(features)
        if torch.is_grad_enabled():
            rows = torch.arange(len(output.values)) < 8
            # 0 with derivative 1/0: only gradients are not finite.
            zero = torch.where(rows, (output.values - output.values.detach()).abs().sqrt(), 0.0)
            return output._replace(values=output.values + zero)
        return output


def test_non_finite_gradient_names_tensor_minibatch_and_agents(tmp_path):
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, run="nan", policy="test_full_runs:OverflowingFast")
    message = str(caught.value)
    assert message.startswith("iteration 1, epoch 1, minibatch 1: not finite: the gradient of ")
    assert "; agent" in message
    assert message.endswith("the weights are those before this minibatch.")
    assert all(leaf.isfinite().all() for leaf in latest(tmp_path / "nan").values())


def test_checkpoints_at_intervals_and_at_the_end(tmp_path):
    made = run(tmp_path, trainer__total_timesteps=1280, trainer__checkpoint_interval=2)
    names = sorted(path.name for path in (made.folder / "checkpoints").iterdir())
    assert names == ["000002", "000004", "000005", "best", "latest"]
    assert made.checkpoint.name == "000005"
    even = run(tmp_path, trainer__total_timesteps=1024, trainer__checkpoint_interval=2)
    names = sorted(path.name for path in (even.folder / "checkpoints").iterdir())
    assert names == ["000000", "000002", "000004", "best", "latest"]


def test_teacher_losses_are_logged_until_their_last_step(tmp_path):
    teacher, other = (run(tmp_path, run=name, seed=seed) for name, seed in (("teacher", 1), ("other", 2)))
    teachers = f"{teacher.folder} action=2 steps=700 anneal=0.5 + {other.folder}"
    taught = run(tmp_path, run="taught", trainer__teachers=teachers)
    lines = lines_of(taught.folder)[:-1]
    assert all(line["losses/teacher_action@other"] > 0 for line in lines)
    # 256 steps per iteration: the first teacher ends after three.
    assert ["losses/teacher_action@teacher" in line for line in lines] == [True, True, True, False]


def test_invalid_teachers_are_refused_before_training(tmp_path):
    for teachers, line in (
        ("runs/missing", "trainer.teachers: runs/missing is not a run's folder; give for example runs/NAME."),
        ("runs/missing acton=2", "there is no acton; did you mean action?"),
        ("runs/missing +", "'+' is not key=value"),
    ):
        with pytest.raises(ConfigError) as caught:
            run(tmp_path, trainer__teachers=teachers)
        assert line in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_trace_logs_the_memory_of_one_agent(tmp_path, capsys):
    assert main([*words(tmp_path, run="traced"), "--trace=3"]) == 0
    output = capsys.readouterr().out
    file = (tmp_path / "traced" / "trace.txt").read_text()
    for text in (output, file):
        assert "Agent 3 · rollout 1 · steps 0-15 · weights of version 0" in text
        assert "entry state: zeros" in text
        assert "state carried over, |state| " in text
        assert "Update · weights changed: version 0 → 1" in text
        assert "env_obs" in text
    assert "agent 3: the trace continues in " in output
    assert "rollout 4" in file
    assert "rollout 4" not in output


def test_tracing_a_missing_agent_is_refused(tmp_path, capsys):
    assert main([*words(tmp_path), "--trace"]) == 2
    assert "There is no agent 42 to trace; there are agents 0 to 15" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tracker_that_fails_to_open_leaves_no_run_directory(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "missing"))
    assert main(words(tmp_path / "runs", run="lost", wandb="online")) == 2
    error = capsys.readouterr().err
    assert error.startswith("holdfast: wandb failed to open: ")
    assert error.endswith("Type wandb=off to train without it.\n")
    assert ".." not in error
    assert not (tmp_path / "runs" / "lost").exists()


def test_horizon_advice_is_printed_only_if_memory_is_used():
    lines = []
    console = RunConsole(1, Console(file=io.StringIO()))
    console.print = lines.append
    notices = RunNotices(console, 64)
    notices.on_metrics({"memory/gradient_reach": 10}, "")
    notices.print_advice({})
    notices.print_advice({"eval/return_mean": 0.25, "eval/return_mean_memory_cleared": 0.25})
    assert lines == []
    notices.print_advice({"eval/return_mean": 0.9, "eval/return_mean_memory_cleared": 0.25})
    assert lines == ["80 % of the gradient lies within 10 of 64 steps: trainer.bptt_horizon=16 is enough."]


def test_tensorboard_gets_every_line_of_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = run(tmp_path, run="tracked", tensorboard="on")
    events = EventAccumulator(str(made.folder / "tensorboard"))
    events.Reload()
    returns = [event.value for event in events.Scalars("charts/episodic_return")]
    assert returns == pytest.approx([line["charts/episodic_return"] for line in lines_of(made.folder)[:-1]])
    assert events.Scalars("eval/return_mean")[0].value == pytest.approx(made.summary["eval/return_mean"])


def test_nan_weights_after_the_last_iteration_fail_the_run(tmp_path, monkeypatch, capsys):
    poison_weights(monkeypatch, at=3)
    assert main(words(tmp_path, run="nan", trainer__checkpoint_interval=2)) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("holdfast: after iteration 4: weights are not finite: ")
    assert "greedy return" not in captured.out
    assert (tmp_path / "nan" / "checkpoints" / "latest").resolve().name == "000003"


def test_teachers_with_equal_folder_names_get_distinct_names(tmp_path):
    folders = [run(tmp_path / name, run="x", seed=seed).folder for name, seed in (("a", 1), ("b", 2))]
    teachers = " + ".join(map(str, folders))
    taught = run(tmp_path, trainer__teachers=teachers)
    assert {"losses/teacher_action@x", "losses/teacher_action@x-2"} <= taught.summary.keys()


def test_a_teacher_without_an_action_is_reported(tmp_path, capsys):
    teacher = run(tmp_path, run="two", world__cues=2)
    capsys.readouterr()
    run(tmp_path, world__cues=4, trainer__teachers=str(teacher.folder))
    output = capsys.readouterr().out
    assert "teacher two does not have the actions " in output
    run(tmp_path, world__cues=2, trainer__teachers=str(teacher.folder))
    assert "does not have the actions" not in capsys.readouterr().out


@pytest.mark.parametrize(("key", "value"), [("trainer__ppo__l2_reg", 1e38), ("teacher", float("nan"))])
def test_non_finite_loss_terms_and_teacher_values_are_named(tmp_path, key, value, monkeypatch):
    teacher = run(tmp_path, run="teacher").folder
    more = {key: value}
    if key == "teacher":
        more = {"trainer__teachers": str(teacher)}
        monkeypatch.setattr(Teacher, "_forward", poisoned(Teacher._forward))
    with pytest.raises(NonFiniteError) as caught:
        run(tmp_path, **more)
    # The squares are finite, their weighted sum is not.
    squares = "the loss, of finite terms: a coefficient is too large"
    expected = "values of teacher teacher is not finite" if key == "teacher" else squares
    assert expected in str(caught.value)


def poisoned(forward):
    def wrapper(self, steps, start):
        outputs = forward(self, steps, start)
        outputs["values"] = outputs["values"] * float("nan")
        return outputs

    return wrapper


@pytest.mark.slow
@pytest.mark.usefixtures("annotations_asleep")
def test_compiled_policies_are_monitored(tmp_path):
    made = run(tmp_path, policy__compile=True, trainer__total_timesteps=256)
    assert made.summary["memory/gradient_reach"] >= 1


def test_logged_times_sum_to_the_wall_time(tmp_path):
    made = run(tmp_path, trainer__checkpoint_interval=1, trainer__analyze_weights_interval=1)
    lines = lines_of(made.folder)[:-1]
    for before, line in itertools.pairwise([{"seconds": 0.0}, *lines]):
        total = sum(number for name, number in line.items() if name.startswith("time/"))
        assert total == pytest.approx(line["seconds"] - before["seconds"], rel=1e-6, abs=1e-9)
        assert line["charts/SPS"] == pytest.approx(256 / total, rel=1e-6)


def test_graph_bytes_are_logged_only_if_measured(tmp_path):
    plain, warm = (
        run(tmp_path, trainer__monitor="off", trainer__stale=mode, trainer__burn_in=4) for mode in ("keep", "burn_in")
    )
    assert "memory/graph_bytes" not in plain.summary
    assert warm.summary["memory/buffer_bytes"] > plain.summary["memory/buffer_bytes"]
