import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium
import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast import rng
from holdfast.build import build_policy, build_world
from holdfast.checkpoint.run_dir import load_weights
from holdfast.cli import main
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError, ContractError
from holdfast.policies import POLICIES
from holdfast.recipes import find_recipe
from holdfast.report.console import RunConsole
from holdfast.report.metrics import METRICS

ROOT = Path(__file__).parents[2]
TINY = {
    "world.agents": 16,
    "trainer.bptt_horizon": 8,
    "trainer.batch_size": 256,
    "trainer.minibatch_size": 64,
    "trainer.total_timesteps": 5000,
    "report": "off",
    "trainer.eval_episodes": 30,
    "policy.hidden_size": 8,
    "policy.num_layers": 1,
}
TIMES = {name for name, metric in METRICS.items() if metric.kind == "time"}
MONITORED = {"memory/gradient_reach", "gradients/within", "gradients/norm"}
EVALUATION = {"eval/return_mean", "eval/return_mean_memory_cleared", "eval/sampled_return_mean"}
CHECK = {"memory/check_replay", "memory/check_clear"}


def tiny_train(runs_dir, **keys):
    keys = {key.replace("__", "."): value for key, value in keys.items()}
    return holdfast.train("recall", {**TINY, "runs_dir": str(runs_dir), **keys})


def metrics_of(run_folder):
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def weights_in(run_folder):
    return load_file(run_folder / "checkpoints" / "latest" / "model.safetensors")


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A short run with episodes of mixed lengths, which start anywhere in a segment."""
    return tiny_train(tmp_path_factory.mktemp("runs"), run="mixed", world__delay="2..9", seed=3)


def test_run_directory_contents(mixed):
    assert mixed.finished
    assert mixed.folder.name == "mixed"
    names = {path.name for path in mixed.folder.iterdir()}
    assert names == {"config.json", "command.txt", "metrics.jsonl", "machine.jsonl", "checkpoints", ".lock"}
    # 5000 steps in batches of 256 are 20 iterations.
    assert mixed.checkpoint == mixed.folder / "checkpoints" / "000020"
    assert (mixed.folder / "checkpoints" / "latest").resolve() == mixed.checkpoint.resolve()


def test_saved_config_equals_recipe_with_overrides(mixed):
    keys = {**TINY, "runs_dir": str(mixed.folder.parent), "run": "mixed", "seed": 3, "world.delay": (2, 9)}
    for file in (mixed.folder / "config.json", mixed.checkpoint / "config.json"):
        assert Config.model_validate_json(file.read_text()) == override(find_recipe("recall"), keys)


def test_command_file_records_the_call_and_versions(mixed):
    text = (mixed.folder / "command.txt").read_text()
    command = text.splitlines()[0].removeprefix("command: holdfast.train('recall', ").removesuffix(")")
    keys = {"runs_dir": str(mixed.folder.parent), "run": "mixed", "world.delay": "2..9", "seed": 3}
    assert ast.literal_eval(command) == {**TINY, **keys}
    assert f"torch: {torch.__version__}\n" in text


def test_logged_metrics_are_all_described(mixed):
    # tests/integration/test_full_runs.py checks that every description has a metric.
    lines = metrics_of(mixed.folder)
    names = [{key.partition("@")[0] for key in line} for line in lines]
    always = set.intersection(*names[:-1])
    assert set.union(*names) <= METRICS.keys()
    assert not always & (CHECK | MONITORED | EVALUATION)
    for iteration, logged in enumerate(names[:-1]):
        expected = always | (CHECK if iteration < 2 else set())
        assert logged == expected | (MONITORED if iteration in (0, 1, 10) else set())
    assert lines[-1].keys() == {"iteration", "global_step"} | EVALUATION
    for line in lines:
        assert all(isinstance(number, int | float) and number == number for number in line.values())


def test_metrics_lines_count_iterations_and_steps(mixed):
    lines = metrics_of(mixed.folder)
    assert [line["iteration"] for line in lines] == [*range(1, 21), 20]
    assert [line["global_step"] for line in lines] == [*range(256, 5121, 256), 5120]
    seconds = [line["seconds"] for line in lines[:-1]]
    assert seconds == sorted(seconds)


def test_result_metrics_are_those_of_the_last_iteration_and_evaluation(mixed):
    *_, iteration, evaluation = metrics_of(mixed.folder)
    machine = [json.loads(line) for line in (mixed.folder / "machine.jsonl").read_text().splitlines()][-1]
    assert mixed.summary == iteration | machine | evaluation


def test_replay_error_is_small_in_every_iteration(mixed):
    for line in metrics_of(mixed.folder)[:-1]:
        assert line["memory/replay_error"] <= 1e-5
        assert line["memory/replay_value_error"] <= 1e-5


def test_episode_counts_lengths_and_returns_are_plausible(mixed):
    lines = metrics_of(mixed.folder)[:-1]
    episodes = sum(line["charts/episodes"] for line in lines)
    # 5120 steps in episodes of 4 to 11 steps.
    assert 5120 / 11 - 16 <= episodes <= 5120 / 4
    for line in lines:
        assert 4 <= line["charts/episodic_length"] <= 11
        assert 0 <= line["charts/episodic_return"] <= 1


def test_learning_rate_and_entropy_coefficient_decay_linearly(mixed):
    lines = metrics_of(mixed.folder)[:-1]
    rates = [line["charts/learning_rate"] for line in lines]
    assert rates == pytest.approx([1e-3 + (1e-4 - 1e-3) * i / 20 for i in range(20)])
    bonus = [line["charts/scheduled@trainer.ppo.ent_coef"] for line in lines]
    assert bonus == pytest.approx([0.02 - 0.02 * i / 20 for i in range(20)])


def test_saved_weights_give_the_trained_policys_outputs(mixed):
    config = Config.model_validate_json((mixed.folder / "config.json").read_text())
    world = build_world(config, torch.device("cpu"), agents=5, seed=1)
    fresh = build_policy(config, world, torch.device("cpu"))
    untrained = {key: leaf.clone() for key, leaf in fresh.state_dict().items()}
    load_weights(fresh, mixed.folder / "checkpoints" / "latest" / "model.safetensors")
    assert not same_weights(untrained, fresh.state_dict())
    states = {id(policy): policy.lstm.cell.initial(5) for policy in (fresh, mixed.policy)}
    step = world.reset()
    for _ in range(12):
        outputs = []
        for policy in (fresh, mixed.policy):
            with torch.no_grad():
                output, states[id(policy)] = policy.unroll(step.obs, step.first, states[id(policy)])
            outputs.append(output)
        assert torch.equal(outputs[0].logits, outputs[1].logits)
        assert torch.equal(outputs[0].values, outputs[1].values)
        step = world.step(outputs[0].logits.argmax(-1))


def test_same_seed_gives_a_bit_equal_run(mixed, tmp_path):
    torch.manual_seed(123)  # the process may have drawn before
    repeated = tiny_train(tmp_path, world__delay="2..9", seed=3)
    for one, other in zip(metrics_of(mixed.folder), metrics_of(repeated.folder), strict=True):
        assert {k: one[k] for k in one.keys() - TIMES} == {k: other[k] for k in other.keys() - TIMES}
    assert same_weights(weights_in(mixed.folder), weights_in(repeated.folder))


def test_another_seed_gives_a_different_run(mixed, tmp_path):
    other = tiny_train(tmp_path, world__delay="2..9", seed=4, trainer__total_timesteps=512)
    one, two = metrics_of(mixed.folder)[0], metrics_of(other.folder)[0]
    assert one["losses/policy_loss"] != two["losses/policy_loss"]
    assert one["charts/episodes"] != two["charts/episodes"]
    assert not same_weights(weights_in(mixed.folder), weights_in(other.folder))


def test_all_random_draws_come_from_the_seed_and_evaluation_is_held_out(tmp_path, monkeypatch):
    draws = set()
    random_bits = rng.random_bits

    def record(seed, stream, agent, step):
        draws.add((seed, stream))
        return random_bits(seed, stream, agent, step)

    monkeypatch.setattr(rng, "random_bits", record)
    tiny_train(tmp_path, seed=7, trainer__total_timesteps=256)
    training = {(7, rng.STREAM_WORLD), (7, rng.STREAM_ACTION), (7, rng.STREAM_MINIBATCH)}
    held_out = rng.derive_seed(7, rng.STREAM_HELD_OUT)
    # The gradient probe is the same in every run, so that its metrics can be compared.
    probe = (0, rng.STREAM_PROBE)
    evaluation = {(held_out, rng.STREAM_WORLD), (held_out, rng.STREAM_ACTION), (7, rng.STREAM_HELD_OUT)}
    assert draws == training | evaluation | {probe}


def test_training_restores_the_global_rng_state(tmp_path):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tiny_train(tmp_path, trainer__total_timesteps=256)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_existing_run_directory_is_not_touched(mixed, capsys):
    before = {path: path.stat().st_mtime_ns for path in mixed.folder.rglob("*")}
    second = tiny_train(mixed.folder.parent, run="mixed", trainer__total_timesteps=256)
    assert second.folder.name == "mixed-2"
    assert f"{mixed.folder} exists; this run is mixed-2." in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in mixed.folder.rglob("*")} == before


def test_default_run_name_has_world_and_time(tmp_path):
    one, other = (tiny_train(tmp_path, trainer__total_timesteps=256) for _ in range(2))
    assert one.folder.name.startswith("recall-20")
    assert one.folder != other.folder


@pytest.mark.parametrize(
    "keys",
    [
        {"world__truncate": True},
        {"world__delay": 0, "world__cues": 2},
        {"memory__clear_on": "never"},
        {"memory__clear_on": "trial"},
        {"policy__memory_init": "original"},
        {"policy__num_layers": 3, "policy__name": "auto"},
        {"trainer__bptt_horizon": 1, "trainer__ppo__norm_adv": False},
        {"trainer__ppo__clip_vloss": True, "schedule": "none"},
        {"world__agents": 1, "trainer__batch_size": 64, "trainer__total_timesteps": 128},
    ],
    ids=str,
)
def test_replay_error_is_small_for_every_kind_of_run(tmp_path, keys):
    run = tiny_train(tmp_path, **{"trainer__total_timesteps": 512, **keys})
    lines = metrics_of(run.folder)
    assert run.finished
    assert len(lines) == 3
    assert all(line["memory/replay_error"] <= 1e-5 for line in lines[:-1])
    assert 0 <= lines[-1]["eval/return_mean"] <= 1


def test_train_accepts_command_line_aliases(tmp_path):
    run = tiny_train(tmp_path, world="recall", py_agent="auto.py", trainer__total_timesteps="256")
    config = Config.model_validate_json((run.folder / "config.json").read_text())
    assert (config.world.name, config.policy.name, config.iterations) == ("recall", "auto", 1)


def test_derived_seeds_are_distinct_and_in_range():
    seeds = {rng.derive_seed(seed, rng.STREAM_HELD_OUT, n) for seed in range(-50, 50) for n in range(10)}
    assert len(seeds) == 1000
    assert min(seeds) >= 0
    assert max(seeds) < 2**31


def test_multi_agent_world_is_evaluated(tmp_path):
    sizes = {"world__agents": 24, "world__length": 4, "world__size": 12, "trainer__batch_size": 192}
    run = tiny_train(tmp_path, world="arena", trainer__total_timesteps=192, **sizes)
    assert run.finished
    assert 0 <= run.summary["eval/return_mean"] <= 4


def test_first_signal_during_final_evaluation_ends_it(tmp_path, monkeypatch):
    def stop(*args, **options):
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(sys.modules["holdfast.training.train"], "final_evaluation", stop)
    run = tiny_train(tmp_path, trainer__total_timesteps=256)
    assert not run.finished
    assert not run.summary.keys() & EVALUATION
    assert weights_in(run.folder)


def test_final_evaluation_is_skipped_if_no_episode_ended(tmp_path, capsys):
    run = tiny_train(tmp_path, world="constant", world__length=200, trainer__total_timesteps=256)
    assert run.finished
    assert not run.summary.keys() & EVALUATION
    assert "no episode ended during training, so there is no evaluation; try holdfast eval." in capsys.readouterr().out


def test_signal_in_the_last_iteration_skips_the_final_evaluation(tmp_path, monkeypatch):
    # The only iteration is complete, but not evaluated.
    monkeypatch.setattr(RunConsole, "show", lambda *args: signal.raise_signal(signal.SIGTERM))
    run = tiny_train(tmp_path, trainer__total_timesteps=256)
    assert not run.finished
    (line,) = metrics_of(run.folder)
    assert line.items() <= run.summary.items()
    assert not run.summary.keys() & EVALUATION
    assert run.checkpoint.name == "000001"


def test_non_finite_loss_saves_the_last_finite_weights(tmp_path, capsys):
    args = [f"{key}={value}" for key, value in {**TINY, "run": "broken", "runs_dir": tmp_path}.items()]
    # With coefficients this large the loss overflows in the first update.
    assert main(["train", *args, "trainer.ppo.ent_coef=3e38", "trainer.ppo.vf_coef=3e38"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("holdfast: iteration 1, epoch 1, minibatch 1: not finite: ")
    assert error.count("\n") == 1
    assert all(leaf.isfinite().all() for leaf in weights_in(tmp_path / "broken").values())


def to_args(keys):
    return [f"{key}={value}" for key, value in keys.items()]


@pytest.mark.parametrize(
    ("form", "agent"),
    [
        pytest.param(form, agent, marks=[] if (form, agent) == ("py_agent", "fast") else pytest.mark.slow)
        for form in ("py_agent", "agent")
        for agent in POLICIES
    ],
)
def test_tools_train_script_trains(tmp_path, form, agent):
    args = [
        f"{form}={agent}",
        f"run=test_{agent}",
        "trainer.total_timesteps=5000",
        "trainer.num_workers=2",
        "wandb=off",
    ]
    quick = ["trainer.eval_episodes=100", "report=off", f"runs_dir={tmp_path}"]
    result = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "tools" / "train.py", *args, *quick],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "recall · 64 agents in 2 workers" in result.stdout
    assert result.stdout.splitlines()[-1] == f"results {tmp_path}/test_{agent}"
    folder = tmp_path / f"test_{agent}"
    assert [line["global_step"] for line in metrics_of(folder)] == [4096, 8192, 8192]
    assert all(line["memory/replay_error"] <= 1e-5 for line in metrics_of(folder)[:-1])
    assert f"command: holdfast train {' '.join(args)}" in (folder / "command.txt").read_text()
    config = Config.model_validate_json((folder / "config.json").read_text())
    name = agent if form == "py_agent" else f"component:{agent}"
    assert (config.run, config.policy.name, config.trainer.num_workers) == (f"test_{agent}", name, 2)
    assert (folder / "agent.yaml").exists() == (form == "agent")
    policy = holdfast.make_policy(name, holdfast.make_world("recall", agents=1))
    load_weights(policy, folder / "checkpoints" / "latest" / "model.safetensors")


def test_tools_train_script_is_executable():
    tool = ROOT / "tools" / "train.py"
    assert os.access(tool, os.X_OK)
    assert tool.read_text().startswith("#!/usr/bin/env python")


def wait_for_lines(path, count, process):
    for _ in range(600):
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.communicate(timeout=300)
        time.sleep(0.1)
    raise AssertionError(f"{path} never got {count} lines")


def test_sigint_saves_and_exits_with_code_1(tmp_path):
    keys = {**TINY, "trainer.total_timesteps": "1e9", "run": "long", "runs_dir": tmp_path}
    process = subprocess.Popen(
        [sys.executable, ROOT / "tools" / "train.py", *to_args(keys)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    folder = tmp_path / "long"
    try:
        wait_for_lines(folder / "metrics.jsonl", 2, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert err == ""
    assert f"stopped; resume with: holdfast train --resume {folder}" in out
    assert f"results {folder}" in out
    lines = metrics_of(folder)
    assert (folder / "checkpoints" / "latest").resolve().name == f"{len(lines):06d}"
    assert lines[-1]["iteration"] == len(lines)
    config = Config.model_validate_json((folder / "config.json").read_text())
    world = build_world(config, torch.device("cpu"), agents=1, seed=0)
    policy = build_policy(config, world, torch.device("cpu"))
    untrained = {key: leaf.clone() for key, leaf in policy.state_dict().items()}
    load_weights(policy, folder / "checkpoints" / "latest" / "model.safetensors")
    assert not same_weights(untrained, policy.state_dict())


@pytest.mark.usefixtures("annotations_asleep")
def test_an_environment_in_the_place_of_the_recipe_is_named():
    with pytest.raises(ConfigError, match="is not the name of a recipe; pass an environment as env="):
        holdfast.train(gymnasium.make("CartPole-v1"))


def test_an_exception_of_the_policys_code_is_one_line_and_its_traceback_a_file(tmp_path):
    class Late(POLICIES["example"]):
        def encode(self, obs):
            if self.training and torch.is_grad_enabled():
                raise ValueError("late failure")
            return super().encode(obs)

    with pytest.raises(ContractError, match=r"raised ValueError: late failure \(test_train.py:\d+\)\. Its traceback"):
        holdfast.train("recall", {**TINY, "runs_dir": str(tmp_path)}, policy=Late)
    (file,) = tmp_path.glob("*/error.txt")
    assert "in encode" in file.read_text()
