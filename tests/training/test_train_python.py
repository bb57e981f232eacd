"""holdfast.train with Python objects: environments, policies, configs; resume and load with them."""

import json
import threading

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.vector import SyncVectorEnv

import holdfast
from helpers.gym_envs import Counting
from helpers.small_policy import Small
from helpers.small_runs import LEAST, apart, lines_of
from holdfast.cli import main
from holdfast.config.run import override
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.worlds.builtin.symbols import Recall

KEYS = {
    "trainer.bptt_horizon": 8,
    "trainer.total_timesteps": 128,
    "report": "off",
    "trainer.eval_episodes": 3,
    "trainer.check": "off",
    "trainer.update_epochs": 1,
}
SIZES = {"trainer.batch_size": 64, "trainer.minibatch_size": 32}


def train(folder, name="x", **arguments):
    config = {**KEYS, **SIZES, "runs_dir": str(folder), "run": name, **arguments.pop("config", {})}
    return holdfast.train(config=config, quiet=True, **arguments)


def make_cartpole():
    return gymnasium.make("CartPole-v1")


def make_recall(agents, seed):
    return Recall(agents, seed=seed, delay=2)


def small(world, **options):
    return holdfast.make_policy("fast", world, seed=0, hidden_size=8, num_layers=1, **options)


ENVS = {
    "id": (lambda: "CartPole-v1", "gym:CartPole-v1", 4),
    "world name": (lambda: "recall", "recall", 4),
    "class": (lambda: CartPoleEnv, "gymnasium.envs.classic_control.cartpole:CartPoleEnv", 4),
    "function": (lambda: make_cartpole, "python:CartPole-v1", 4),
    "vector function": (lambda: lambda: SyncVectorEnv([Counting] * 2), "python:SyncVectorEnv", 2),
    "world function": (lambda: make_recall, "python:make_recall", 4),
    "env": (make_cartpole, "python:CartPole-v1", 1),
    "vector": (lambda: SyncVectorEnv([Counting] * 2), "python:SyncVectorEnv", 2),
    "world": (lambda: Recall(2, delay=2), "python:Recall", 2),
}
NAMED = ("id", "world name", "class")
RESTARTING = ("vector function", "vector")
"""Kinds whose episodes cannot be restored."""


def stop(iteration):
    iteration.stop()


@pytest.mark.parametrize("kind", ENVS)
def test_every_kind_of_env_trains_and_resumes(kind, tmp_path, capsys):
    make, name, agents = ENVS[kind]
    config = {"world.agents": 4} if agents == 4 else {}
    full = train(tmp_path, "full", env=make(), config=config)
    saved = json.loads((full.folder / "config.json").read_text())["world"]
    assert (saved["name"], saved["agents"]) == (name, agents)
    assert (full.finished, full.summary["iteration"]) == (True, 2)
    assert np.isfinite(full.summary["eval/return_mean"])
    parts = train(tmp_path, "parts", env=make(), config=config, callbacks=[stop])
    assert (parts.finished, parts.summary["iteration"]) == (False, 1)
    command = ["train", "--resume", str(parts.folder)]
    capsys.readouterr()
    if kind in NAMED:
        assert main(command) == 0
    else:
        assert main(command) == 2
        error = capsys.readouterr().err
        assert (error.count("\n"), "pass it again: holdfast.train(env=..., resume=RUN)" in error) == (1, True)
        assert holdfast.train(env=make(), resume=parts.folder, quiet=True).finished
    differences = apart(full.folder, parts.folder)
    assert bool(differences) == (kind in RESTARTING), differences


def test_id_and_function_train_the_same_weights(tmp_path):
    by_id, by_function = (
        train(tmp_path, name, env=env, config={"world.agents": 4})
        for name, env in (("id", "CartPole-v1"), ("function", make_cartpole))
    )
    weights, others = by_id.policy.state_dict(), by_function.policy.state_dict()
    assert all(torch.equal(others[key], value) for key, value in weights.items() if isinstance(value, torch.Tensor))
    assert by_id.summary["eval/return_mean"] == by_function.summary["eval/return_mean"]


def test_batch_sizes_are_made_to_fit_unless_they_are_set(tmp_path):
    run = holdfast.train(
        env=lambda: SyncVectorEnv([Counting] * 3),
        config={**KEYS, "runs_dir": str(tmp_path), "trainer.total_timesteps": 1},
        quiet=True,
    )
    trainer = json.loads((run.folder / "config.json").read_text())["trainer"]
    assert (trainer["batch_size"] % 24, trainer["batch_size"] % trainer["minibatch_size"]) == (0, 0)
    assert abs(trainer["batch_size"] - 2048) <= 12
    with pytest.raises(ConfigError, match=r"is not a multiple of world.agents .* = 3 .* try trainer.batch_size="):
        train(tmp_path, env=SyncVectorEnv([Counting] * 3))


def test_objects_stay_open_and_what_a_function_makes_is_closed(tmp_path):
    env, vector, made = Counting(), SyncVectorEnv([Counting] * 2), []

    def make():
        made.append(Counting())
        return made[-1]

    train(tmp_path, env=env)
    train(tmp_path, env=vector)
    assert not env.closed
    assert not any(inner.closed for inner in vector.envs)
    train(tmp_path, env=make, config={"world.agents": 2})
    # Two to train in, two for the spec of the evaluation, three for its episodes.
    assert len(made) == 7
    assert all(env.closed for env in made)


def test_periodic_evaluation_needs_a_second_environment(tmp_path):
    config = {"trainer.eval_interval": 1}
    with pytest.raises(ConfigError, match=r"trainer.eval_interval=1 needs another python:Counting .* env=lambda: ..."):
        train(tmp_path, env=Counting(), config=config)
    assert list(tmp_path.iterdir()) == []
    run = train(tmp_path, env=make_cartpole, config={**config, "world.agents": 4})
    assert np.isfinite(run.metrics["eval/return_mean"]).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env": "recall", "config": {"world": "tmaze"}}, "world=tmaze and env= name two; leave out one"),
        ({"policy": "fast", "config": {"agent": "fast"}}, "agent=fast and policy= name two"),
        ({"env": Counting(), "config": {"trainer.num_workers": 1}}, "object of this program, which worker processes"),
        ({"env": Counting(), "config": {"world.agents": 2}}, "is one environment, with one agent, not 2"),
        ({"callbacks": [3]}, "callbacks: 3 cannot be called"),
        ({"recipe": "CartPole-v1"}, "an environment: write world=gym:CartPole-v1, in Python env='CartPole-v1'"),
        ({"recipe": "recal"}, "no recipe 'recal'; did you mean recall"),
    ],
)
@pytest.mark.usefixtures("annotations_asleep")
def test_wrong_arguments_say_what_to_type(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, **arguments)


def test_a_whole_config_and_a_recipe_exclude_each_other(tmp_path):
    config = override(find_recipe("general"), {**KEYS, **SIZES, "world.agents": 4, "runs_dir": str(tmp_path)})
    run = holdfast.train(config=config, env="CartPole-v1", quiet=True)
    assert run.summary["global_step"] == 128
    with pytest.raises(ConfigError, match="leave out the recipe 'recall', or pass the keys"):
        holdfast.train("recall", config)
    with pytest.raises(ConfigError, match="resumes with its own config; leave out the Config"):
        holdfast.train(config=config, resume=run.folder)


def test_a_policy_object_is_trained_in_place_and_loaded_into_a_copy(tmp_path, capsys):
    env = Counting()
    policy = small(holdfast.make_world(env), normalize_obs=True)
    before = {key: value.clone() for key, value in policy.state_dict().items() if isinstance(value, torch.Tensor)}
    run = train(tmp_path, env=env, policy=policy)
    assert run.policy is policy
    assert any(not torch.equal(policy.state_dict()[key], value) for key, value in before.items())
    saved = json.loads((run.folder / "config.json").read_text())["policy"]
    assert (saved["name"], saved["normalize_obs"], saved["normalize_value"]) == ("python:Fast", True, False)
    fresh = small(holdfast.make_world(env), normalize_obs=True)
    player = holdfast.load(run.folder, env=env, policy=fresh)
    assert all(torch.equal(player.policy.state_dict()[key], policy.state_dict()[key]) for key in before)
    assert all(torch.equal(fresh.state_dict()[key], value) for key, value in before.items())
    assert player.start().act(np.zeros((1, 2), np.float32), [True]).shape == (1,)
    for words in (["eval"], ["check"], ["export", "--to", "torch"], ["train", "--resume"]):
        assert main([*words, str(run.folder)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(ConfigError, match=r"The policy python:Fast is an object .* holdfast.load\(RUN, policy=...\)"):
        holdfast.load(run.folder, env=env)
    with pytest.raises(ConfigError, match="env is gym:CartPole-v1, but the run was trained in python:Counting"):
        holdfast.load(run.folder, env="CartPole-v1")
    with pytest.raises(ConfigError, match="policy is fast, but the run trained python:Fast"):
        holdfast.load(run.folder, env=env, policy="fast")


def test_a_policy_object_resumes_bit_for_bit(tmp_path):
    env = make_cartpole()
    world = holdfast.make_world(env)
    full = train(tmp_path, "full", env=env, policy=small(world))
    parts = train(tmp_path, "parts", env=env, policy=small(world), callbacks=[stop])
    policy = small(world)
    resumed = holdfast.train(env=env, policy=policy, resume=parts.folder, quiet=True)
    assert resumed.policy is policy
    assert apart(full.folder, parts.folder) == []


def test_keys_of_a_policy_object_are_refused(tmp_path):
    policy = small(holdfast.make_world(Counting()))
    for key in ("policy.hidden_size", "memory.clear_on"):
        with pytest.raises(ConfigError, match=f"{key} is decided where the policy is made"):
            train(tmp_path, env=Counting(), policy=policy, config={key: 8})
    with pytest.raises(ConfigError, match=r"requires a gradient; type policy.requires_grad_\(\)"):
        train(tmp_path, env=Counting(), policy=policy.requires_grad_(False))
    with pytest.raises(holdfast.ContractError, match="bound to a world with other observations"):
        train(tmp_path, env="CartPole-v1", policy=policy.requires_grad_(), config={"world.agents": 4})


def test_a_policy_class_is_built_by_the_run(tmp_path):
    class Local(Small):
        """Not importable."""

    config = {"world.agents": 4, "policy.hidden_size": 8}
    named = train(tmp_path, "named", env=make_cartpole, policy=Small, config=config)
    local = train(tmp_path, "local", env=make_cartpole, policy=Local, config=config)
    names = [json.loads((run.folder / "config.json").read_text())["policy"]["name"] for run in (named, local)]
    assert names == ["helpers.small_policy:Small", "python:Local"]
    assert lines_of(named.folder) == lines_of(local.folder)
    assert type(holdfast.load(named.folder, env=make_cartpole).policy) is Small
    assert type(holdfast.load(local.folder, env=make_cartpole, policy=Local).policy) is Local


def test_metrics_are_arrays_over_iterations_with_nan_where_nothing_was_measured(tmp_path):
    run = train(tmp_path, env="CartPole-v1", config={"world.agents": 4})
    assert {len(array) for array in run.metrics.values()} == {2}
    assert run.metrics["iteration"].tolist() == [1, 2]
    assert run.metrics["global_step"].tolist() == [64, 128]
    assert np.isnan(run.metrics["eval/return_mean"]).tolist() == [True, False]
    assert all(run.metrics[name][-1] == value for name, value in run.summary.items())
    assert "machine/process_bytes" in run.metrics


def test_repr_names_folder_progress_and_returns(tmp_path):
    run = train(tmp_path, env="recall", config={"world.agents": 4, "trainer.total_timesteps": 64})
    names = ("return_mean", "sampled_return_mean", "return_mean_memory_cleared")
    greedy, sampled, cleared = (run.summary[f"eval/{name}"] for name in names)
    text = f"greedy return {greedy:.3f} · sampled return {sampled:.3f} · with memory cleared every step {cleared:.3f}>"
    assert repr(run).startswith(f"<run {tmp_path / 'x'}: finished after 1 iteration, 64 steps · ")
    assert repr(run).endswith(text)


class Generous(Counting):
    """Rewards so large that the gradient explodes."""

    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, 1e6, *rest


def test_quiet_prints_alarms_alone(tmp_path, capsys):
    train(tmp_path, "healthy", env=Counting())
    assert tuple(capsys.readouterr()) == ("", "")
    raw = {"policy.normalize_value": False, "trainer.normalize_reward": False}
    train(tmp_path, "exploding", env=Generous(), config=raw)
    out, err = capsys.readouterr()
    assert out.startswith("ALARM: the gradient norm before clipping is")
    assert all(line.startswith("ALARM: ") for line in out.splitlines())
    assert err == ""


def test_train_in_another_thread(tmp_path):
    runs = []
    work = threading.Thread(target=lambda: runs.append(train(tmp_path, env=Counting())))
    work.start()
    work.join(timeout=120)
    assert runs[0].finished


def test_train_leaves_the_number_of_threads_as_it_was(tmp_path):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(tmp_path, env=Counting())
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("annotations_asleep")
def test_export_of_a_run_with_objects(tmp_path):
    run = train(tmp_path, env=Counting(), policy=small(holdfast.make_world(Counting())))
    player = holdfast.load(run.folder, env=Counting(), policy=run.policy)
    player.export(tmp_path / "policy.pt2")
    assert (tmp_path / "policy.pt2").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"ends in .onnx; try .*policy.onnx"):
        player.export(tmp_path / "policy.txt")


def test_classes_of_the_script_that_trained_are_passed_by_another_program(tmp_path, monkeypatch):
    """In the script they were `__main__:Class`."""
    for kind in (Counting, holdfast.Fast):
        monkeypatch.setattr(kind, "__module__", "__main__")
    config = {**LEAST, "runs_dir": str(tmp_path)}
    run = holdfast.train(env=Counting, policy=holdfast.Fast, config=config, quiet=True)
    monkeypatch.undo()
    assert holdfast.load(run.folder, env=Counting, policy=holdfast.Fast).weights_hash
    with pytest.raises(ConfigError, match="but the run trained python:Fast"):
        holdfast.load(run.folder, env=Counting, policy=Small)
