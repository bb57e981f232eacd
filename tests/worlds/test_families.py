"""A new family of environments is one file and one line of FAMILIES, or an entry point."""

import subprocess
import sys
import textwrap
from importlib.metadata import EntryPoint

import pytest
import torch

from holdfast import make_world, registry, worlds
from holdfast.build import build_training_world
from holdfast.cli import main
from holdfast.config.run import override, read_config
from holdfast.config.world_names import FAMILIES, world_config_class
from holdfast.errors import ConfigError
from holdfast.evaluation.held_out import force_sync
from holdfast.recipes import find_recipe
from holdfast.training.train import train

CPU = torch.device("cpu")
FAMILY = '''
from typing import ClassVar, Literal
import torch
from holdfast import Step, WorldSpec
from holdfast.config.base import Int
from holdfast.config.worlds import Family, WorldConfig


class DiceConfig(WorldConfig):
    """Dice of a number of sides: dice:COLOUR."""

    family: ClassVar[Family] = Family(
        "dice_worlds:Dice", ids="COLOUR", max_shards=1,
        sync={"vector": "sync", "batch": 0},
    )
    name: str
    sides: Int = 6
    vector: Literal["sync", "async"] = "sync"
    batch: Int = 0


class Dice:
    def __init__(self, agents, *, env, sides=6, vector="sync", batch=0, seed=0, device="cpu"):
        self.agents, self.env, self.sides = agents, env, sides
        self.spec = WorldSpec((1,), tuple(f"side_{n}" for n in range(sides)))

    def reset(self):
        self.t = 0
        return self.make_step()

    def step(self, actions):
        self.t += 1
        return self.make_step()

    def make_step(self):
        flags = torch.zeros(self.agents, dtype=torch.bool)
        ends = flags | (self.t > 0 and self.t % 4 == 0)
        obs = torch.full((self.agents, 1), float(self.t % 4))
        return Step(obs, torch.ones(self.agents), ends, flags, ends | (self.t == 0), ~flags, flags)


class MissingConfig(DiceConfig):
    family: ClassVar[Family] = Family("dice_worlds:Dice", package="no_such_package")


class NoConfig:
    pass
'''


@pytest.fixture
def dice(tmp_path, monkeypatch):
    (tmp_path / "dice_worlds.py").write_text(textwrap.dedent(FAMILY))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "dice_worlds:DiceConfig"
    sys.modules.pop("dice_worlds", None)


def add_line(monkeypatch, name, value):
    monkeypatch.setattr(FAMILIES, "_entries", {**FAMILIES._entries, name: value})


def add_entry_point(monkeypatch, name, value):
    points = [EntryPoint(name, value, "holdfast.worlds")]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == FAMILIES.group else [])


@pytest.mark.parametrize("add", [add_line, add_entry_point])
def test_family_is_configured_built_and_trained(add, dice, monkeypatch, tmp_path, capsys):
    add(monkeypatch, "dice", dice)
    keys = {
        "world": "dice:red",
        "world.sides": "3",
        "policy": "auto",
        "policy.hidden_size": 4,
        "policy.num_layers": 1,
        "trainer.total_timesteps": 1024,
        "trainer.bptt_horizon": 16,
        "trainer.batch_size": 1024,
        "trainer.minibatch_size": 1024,
        "report": "off",
        "trainer.eval_episodes": 8,
        "runs_dir": str(tmp_path),
    }
    config = override(find_recipe("recall"), keys)
    assert config.world.sides == 3
    assert read_config(config.model_dump_json()) == config
    world = make_world("dice:red", agents=2, sides=3)
    assert (world.env, world.sides) == ("red", 3)
    assert make_world("mixture", agents=4, parts="dice:red sides=2 + dice:red sides=2 batch=1").agents == 4
    assert train(None, keys).summary["eval/return_mean"] == 4.0
    assert main(["train", "--help"]) == 0
    assert "dice:COLOUR: Dice of a number of sides" in capsys.readouterr().out
    asynchronous = config.world.model_copy(update={"vector": "async", "batch": 3})
    assert (force_sync(asynchronous).vector, force_sync(asynchronous).batch) == ("sync", 0)
    assert force_sync(config.world) == config.world
    workers = override(config, {"trainer.num_workers": 2})
    with pytest.raises(ConfigError, match="dice:red cannot be split over several workers"):
        build_training_world(workers, CPU, 0)


def test_family_errors_say_what_to_type(dice, monkeypatch):
    add_line(monkeypatch, "dice", dice)
    for name, message in {
        "dice": "write dice:COLOUR",
        "dice:": "write dice:COLOUR",
        "dise:red": "did you mean dice:red",
        "qqq": "choose from recall, .*dice:COLOUR",
    }.items():
        with pytest.raises(ConfigError, match=message):
            world_config_class(name)
    with pytest.raises(ConfigError, match="has no option 'side'; did you mean sides"):
        make_world("dice:red", side=2)
    add_line(monkeypatch, "missing", "dice_worlds:MissingConfig")
    with pytest.raises(ConfigError, match=r"no_such_package is not installed; .*pip install .*\[no_such"):
        make_world("missing:red")
    add_line(monkeypatch, "wrong", "dice_worlds:NoConfig")
    with pytest.raises(ConfigError, match=r"is not a subclass of holdfast\.config\.worlds"):
        world_config_class("wrong:red")


def test_entry_point_adds_a_whole_world(dice, monkeypatch):
    source = sys.path[0] + "/dice_worlds.py"
    with open(source, "a") as file:
        file.write('\n\nclass CoinConfig(DiceConfig):\n    name: str = "coin"\n')
    add_entry_point(monkeypatch, "coin", "dice_worlds:CoinConfig")
    assert override(find_recipe("recall"), {"world": "coin"}).world.sides == 6


ADAPTERS = ("gym", "pettingzoo", "mettagrid", "envpool", "popgym")


def test_importing_the_ppo_update_imports_no_adapter():
    code = f"""
import sys
import holdfast.learn.ppo
import holdfast.worlds.make
print([name for name in {ADAPTERS} if f"holdfast.worlds.{{name}}" in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert result.stdout.strip() == "[]"


def test_worlds_package_has_no_other_attributes():
    assert all(getattr(worlds, name) is not None for name in worlds.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = worlds.nothing
