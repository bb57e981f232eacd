"""Config classes of the built-in worlds match their constructors."""

import inspect

import pytest
import torch

from holdfast.build import build_world
from holdfast.config.run import Config, override, read_config
from holdfast.config.worlds import WORLD_CONFIGS, RecallConfig
from holdfast.errors import ConfigError
from holdfast.recipes import find_recipe
from holdfast.registry import load_object
from holdfast.report.text import config_difference
from holdfast.worlds.make import TRAINER_KEYS

BASE = find_recipe("recall")
SIZES = {"trainer.batch_size": 96 * 64, "trainer.minibatch_size": 96 * 64, "world.agents": 96}


def constructor(name):
    return load_object(WORLD_CONFIGS[name].family.constructor, "")


@pytest.mark.parametrize("name", WORLD_CONFIGS)
def test_config_defaults_match_constructors(name):
    taken = inspect.signature(constructor(name)).parameters
    fields = WORLD_CONFIGS[name].model_fields
    assert set(fields) - {"name", "clip_reward"} == set(taken) - {"seed", "device"}
    assert {key: field.default for key, field in fields.items() if key not in TRAINER_KEYS} == {
        key: each.default for key, each in taken.items() if key not in ("agents", "seed", "device")
    }
    assert all(field.description for field in fields.values())


@pytest.mark.parametrize("name", WORLD_CONFIGS)
def test_builtin_worlds_by_name(name):
    config = override(BASE, {"world": name, **SIZES})
    assert config.world.name == name
    assert read_config(config.model_dump_json()) == config
    world = build_world(config, torch.device("cpu"), agents=24, seed=1)
    assert type(world) is constructor(name)
    assert world.agents == 24


def test_override_world_resets_its_keys():
    config = override(BASE, {"world": "tmaze", "world.corridor": "6"})
    assert config.world.corridor == 6
    assert config.world.agents == 64
    with pytest.raises(ConfigError, match=r"There is no key 'world.cues'"):
        override(BASE, {"world": "tmaze", "world.cues": 4})
    with pytest.raises(ConfigError, match=r"^world.corridor=0: input should be greater"):
        override(BASE, {"world": "tmaze", "world.corridor": 0})
    assert override(config, {"seed": 3}).world.corridor == 6
    rows = [str(cell) for cell in config_difference(BASE, config).columns[0].cells]
    assert {"world.name", "world.corridor"} <= set(rows)
    # Not changed: it has its default.
    assert "world.limit" not in rows


def test_unknown_world_errors():
    for name in ("CartPole-v1", "ALE/Pong-v5", "MiniGrid-DoorKey-5x5-v0"):
        with pytest.raises(ConfigError, match=rf"={name}: there is no such world; did you mean gym:{name}\?$"):
            override(BASE, {"world": name})
    with pytest.raises(ConfigError, match=r"=reacll: there is no such world; did you mean recall\?"):
        override(BASE, {"world": "reacll"})
    with pytest.raises(ConfigError, match="choose from recall, repeat_first"):
        override(BASE, {"world.name": "qqq"})
    with pytest.raises(ConfigError, match=r"world.name=xyz:W: No module named 'xyz'; is it on the Python"):
        override(BASE, {"world.name": "xyz:W"})
    with pytest.raises(ValueError, match="this is the config of recall"):
        RecallConfig(name="tmaze")


def test_default_world():
    assert Config().world.name == "recall"
