"""The worlds' knobs are what the worlds take."""

import inspect

import pytest
import torch

from holdfast.build import build_world
from holdfast.config import Config, change, read_config
from holdfast.errors import ConfigError
from holdfast.knobs import WORLD_KNOBS, RecallWorld
from holdfast.recipes import find_recipe
from holdfast.report import difference
from holdfast.worlds import WORLDS

BASE = find_recipe("recall")
SIZES = {"trainer.batch_size": 96 * 64, "trainer.minibatch_size": 96 * 64, "world.agents": 96}


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_has_its_knobs_with_its_own_defaults(name):
    taken = inspect.signature(WORLDS[name]).parameters
    known = WORLD_KNOBS[name].model_fields
    assert set(known) - {"name"} == set(taken) - {"seed", "device"}
    assert {key: field.default for key, field in known.items() if key not in ("name", "agents")} == {
        key: each.default for key, each in taken.items() if key not in ("agents", "seed", "device")
    }
    assert all(field.description for field in known.values())


@pytest.mark.parametrize("name", WORLDS)
def test_every_world_goes_by_its_name(name):
    config = change(BASE, {"world": name, **SIZES})
    assert config.world.name == name
    assert read_config(config.model_dump_json()) == config
    world = build_world(config, torch.device("cpu"), agents=24, seed=1)
    assert type(world) is WORLDS[name]
    assert world.agents == 24


def test_another_world_has_other_keys_and_forgets_those_of_the_recipes():
    config = change(BASE, {"world": "tmaze", "world.corridor": "6"})
    assert config.world.corridor == 6
    assert config.world.agents == 64
    with pytest.raises(ConfigError, match=r"There is no key 'world.cues'"):
        change(BASE, {"world": "tmaze", "world.cues": 4})
    with pytest.raises(ConfigError, match=r"^world.corridor=0: input should be greater"):
        change(BASE, {"world": "tmaze", "world.corridor": 0})
    assert change(config, {"seed": 3}).world.corridor == 6
    rows = [str(cell) for cell in difference(BASE, config).columns[0].cells]
    assert {"world.name", "world.corridor", "world.limit"} <= set(rows)


def test_a_misspelt_world_is_told():
    with pytest.raises(ConfigError, match=r"=reacll: there is no such world; did you mean recall\?"):
        change(BASE, {"world": "reacll"})
    with pytest.raises(ConfigError, match="there is recall, repeat_first"):
        change(BASE, {"world.name": "qqq"})
    with pytest.raises(ConfigError, match=r"world.name=xyz:W: No module named 'xyz'; is it on the Python"):
        change(BASE, {"world.name": "xyz:W"})
    with pytest.raises(ValueError, match="these are the knobs of recall"):
        RecallWorld(name="tmaze")


def test_the_default_is_the_recipes():
    assert Config().world.name == "recall"
