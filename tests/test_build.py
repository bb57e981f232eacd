"""Building what a config names, and loading policies of saved runs."""

import pytest
import torch

import holdfast
from helpers.small_runs import LEAST
from holdfast.build import build_policy, build_training_world, build_world, load_teacher, select_device
from holdfast.config.run import Config, override
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe

CPU = torch.device("cpu")
SMALL = override(find_recipe("recall"), LEAST)


@pytest.mark.parametrize("name", ["fast", "component:latent_attn_tiny"])
def test_encoder_init_is_for_attention_policies(name):
    keys = {"policy.encoder_init": "original"}
    config = override(SMALL, {**keys, "policy": "latent_attn_tiny"})
    world = build_world(config, CPU, agents=4, seed=0)
    weight = build_policy(config, world, CPU).get_parameter("encoder.embedding.embedding.weight")
    assert weight.std() < 0.03
    with pytest.raises(
        ConfigError, match=f"encoder_init=original is for latent_attn_tiny, .*leave it out for policy={name}"
    ):
        build_policy(override(SMALL, {**keys, "policy": name}), world, CPU)


def test_select_device_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(Config(device="auto")) == select_device(Config(device="cpu")) == CPU
    with pytest.raises(ConfigError, match="torch finds no GPU here; use device=cpu or device=auto"):
        select_device(Config(device="cuda"))


def test_build_policy_passes_the_configured_sizes_and_seed():
    world = build_world(SMALL, CPU, agents=4, seed=0)
    one, other = (build_policy(SMALL, world, CPU) for _ in range(2))
    assert (one.hidden_size, one.num_layers) == (SMALL.policy.hidden_size, SMALL.policy.num_layers or 2)
    weights = other.state_dict()
    assert all(weight.equal(weights[name]) for name, weight in one.state_dict().items())


def test_compile_and_precision_need_a_recurrent_policy():
    name = "helpers.manual_policy:NewLSTMPolicy"
    gym = override(SMALL, {"world": "gym:CartPole-v1", "world.agents": 4})
    world = build_world(gym, CPU, agents=4, seed=0)
    for key, value in (("compile", "true"), ("precision", "bfloat16")):
        config = override(SMALL, {"policy": name, f"policy.{key}": value})
        with pytest.raises(ConfigError, match=rf"policy\.{key}={value} needs a RecurrentPolicy"):
            build_policy(config, world, CPU)
    world.close()


def test_world_that_cannot_be_split_is_refused_before_workers_start():
    keys = {"world": "mixture", "world.parts": "recall + n_back", "world.agents": 4}
    with pytest.raises(ConfigError, match=r"mixture cannot be split .* type trainer.num_workers=1"):
        build_training_world(override(SMALL, {**keys, "trainer.num_workers": 2}), CPU, seed=0)


def test_teacher_must_be_the_folder_of_a_run(tmp_path):
    world = build_world(SMALL, CPU, agents=4, seed=0)
    with pytest.raises(ConfigError, match=r"trainer.teachers: .* is not a run's folder"):
        load_teacher(tmp_path, world, CPU)


def test_values_of_a_teacher_need_raw_rewards(tmp_path):
    keys = {**LEAST, "runs_dir": str(tmp_path)}
    teacher = holdfast.train("recall", {**keys, "run": "teacher"}, quiet=True).folder
    normalized = {**keys, "trainer.normalize_reward": True}
    with pytest.raises(ConfigError, match=r"have different scales; write '.*teacher value=0'"):
        holdfast.train("recall", {**normalized, "trainer.teachers": str(teacher)}, quiet=True)
    run = holdfast.train("recall", {**normalized, "trainer.teachers": f"{teacher} value=0"}, quiet=True)
    with pytest.raises(ConfigError, match="have different scales"):
        holdfast.train("recall", {**keys, "trainer.teachers": str(run.folder)}, quiet=True)
