"""The world in the guide is the world it says it is: it keeps the contract, and is learnt."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.policies import make_policy
from holdfast.worlds import WORLDS

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "worlds.md").read_text()


@pytest.fixture
def folder(tmp_path):
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "class Echo" in each]
    (tmp_path / "echo.py").write_text(block)
    return tmp_path


def holdfast(folder, *words):
    command = [Path(sys.executable).with_name("holdfast"), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_it_keeps_the_contract_and_is_learnt(folder):
    checked = holdfast(folder, "check", "world:echo:Echo")
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
    keys = ["policy=auto", "policy.hidden_size=16", "policy.num_layers=1", "world.wait=2", "world.agents=64"]
    keys += ["trainer.bptt_horizon=16", "trainer.batch_size=1024", "trainer.minibatch_size=256"]
    keys += ["trainer.total_timesteps=2e4", "trainer.eval_episodes=256", "run=echo"]
    trained = holdfast(folder, "train", "world=echo:Echo", *keys)
    assert (trained.returncode, trained.stderr) == (0, "")
    intact, cleared = map(float, re.findall(r"greedy return (\S+) .* every step (\S+)", trained.stdout)[0])
    assert intact >= 0.95
    assert cleared <= 0.6


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "ended=asked, begins=asked",
            "ended=asked, begins=asked & False",
            "acts on after its episode has en",
        ),
        ("ended=asked, begins=asked", "ended=asked & False, begins=asked", "begins an episode"),
        (
            ".float()\n        self.clock",
            ".float() / 0\n        self.clock",
            "got a reward that is not finite",
        ),
        ("obs_shape=(2,)", "obs_shape=(3,)", r"reset\(\): obs is \[64, 2\], must be \[64, 3\]"),
        ("def step(self, actions):", "def step(self, actions):\n        1 / 0", "raised ZeroDivisionError"),
    ],
    ids=["first", "ends", "nan", "shape", "raises"],
)
def test_a_mistake_in_it_is_one_line_that_names_it(folder, old, new, told):
    text = (folder / "echo.py").read_text()
    assert old in text
    (folder / "echo.py").write_text(text.replace(old, new, 1))
    said = holdfast(folder, "train", "world=echo:Echo", "policy=auto", "policy.hidden_size=8", "run=x")
    assert said.returncode == 1
    assert re.fullmatch(rf"holdfast: World Echo, .*{told}.*\n", said.stderr), said.stderr
    assert holdfast(folder, "check", "world:echo:Echo").returncode == 1


def test_the_tokens_in_it_are_read_by_a_policy():
    (block,) = [
        each for each in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "tokens.empty" in each
    ]
    names = {}
    exec(block, names)
    policy = make_policy("fast", names["spec"], hidden_size=4)
    first = torch.ones(8, dtype=torch.bool)
    thoughts, _ = policy.unroll(names["obs"], first, policy.lstm.cell.initial(8))
    assert thoughts.values.isfinite().all()


def test_every_world_is_in_the_table_with_its_keys():
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|", GUIDE, re.MULTILINE))
    for name, kind in WORLDS.items():
        common = ("agents", "truncate", "seed", "device")
        keys = [key for key in inspect.signature(kind).parameters if key not in common]
        assert re.findall(r"`(\w+)`", rows[name]) == keys
