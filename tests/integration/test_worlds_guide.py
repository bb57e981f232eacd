"""The code of docs/guides/write_a_world.md works, and its tables are complete."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.cli import main
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.policies import make_policy
from holdfast.registry import load_object
from holdfast.worlds.step import Drawable

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "write_a_world.md").read_text()
CONTRACT = (ROOT / "docs" / "concepts" / "worlds_contract.md").read_text()


def python_block(marker):
    """Return the one Python block of the guide that contains a marker."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if marker in code]
    return block


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "echo.py").write_text(python_block("class Echo:"))
    return tmp_path


def holdfast(folder, *args):
    command = [Path(sys.executable).with_name("holdfast"), *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=900)


@pytest.mark.slow
def test_guide_world_passes_the_check_and_is_learned(folder):
    checked = holdfast(folder, "check", "world:echo:Echo")
    assert (checked.returncode, checked.stderr) == (0, ""), checked.stdout
    keys = ["policy=auto", "policy.hidden_size=16", "policy.num_layers=1", "world.wait=2", "world.agents=64"]
    keys += ["trainer.bptt_horizon=16", "trainer.batch_size=1024", "trainer.minibatch_size=256"]
    keys += ["trainer.total_timesteps=2e4", "trainer.eval_episodes=256", "report=off", "run=echo"]
    trained = holdfast(folder, "train", "world=echo:Echo", *keys)
    assert (trained.returncode, trained.stderr) == (0, "")
    intact, cleared = map(float, re.findall(r"greedy return (\S+) .* every step (\S+)", trained.stdout)[0])
    assert intact >= 0.95
    assert cleared <= 0.6


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "ended=query, starts=query",
            "ended=query, starts=query & False",
            "acts after its episode ended",
        ),
        ("ended=query, starts=query", "ended=query & False, starts=query", "starts an episode"),
        (
            ".float()\n        self.clock",
            ".float() / 0\n        self.clock",
            "got a reward that is not finite",
        ),
        ("obs_shape=(2,)", "obs_shape=(3,)", r"reset\(\): obs is \[16, 2\], must be \[16, 3\]"),
        ("def step(self, actions):", "def step(self, actions):\n        1 / 0", "raised ZeroDivisionError"),
    ],
    ids=["first", "ends", "nan", "shape", "raises"],
)
def test_mistake_in_the_guide_world_is_a_one_line_error(
    folder, old, new, message, monkeypatch, capsys, annotations_asleep
):
    text = (folder / "echo.py").read_text()
    assert old in text
    (folder / "echo.py").write_text(text.replace(old, new, 1))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("echo", None)
    assert main(["train", "world=echo:Echo", "policy=auto", "policy.hidden_size=8", "run=x"]) == 1
    error = capsys.readouterr().err
    assert re.fullmatch(rf"holdfast: World Echo, .*{message}.*\n", error), error
    assert main(["check", "world:echo:Echo"]) == 1
    sys.modules.pop("echo")


def test_guide_tokens_are_read_by_a_policy():
    names = {}
    exec(python_block("tokens.empty"), names)
    policy = make_policy("fast", names["spec"], hidden_size=4)
    first = torch.ones(8, dtype=torch.bool)
    output, _ = policy.unroll(names["obs"], first, policy.lstm.cell.initial(8))
    assert output.values.isfinite().all()


def test_worlds_table_lists_every_builtin_world_with_its_keys():
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| (.*?) \|", CONTRACT, re.MULTILINE))
    for name, kind in WORLD_CONFIGS.items():
        common = ("agents", "truncate", "seed", "device")
        keys = [
            key for key in inspect.signature(load_object(kind.family.constructor, "")).parameters if key not in common
        ]
        assert re.findall(r"`(\w+)`", rows[name]) == keys


def test_guide_world_on_a_grid_is_drawn():
    names = {}
    exec(python_block("class Echo:") + python_block("class Corridor(Echo)"), names)
    world = names["Corridor"](agents=3)
    world.reset()
    world.step(torch.zeros(3, dtype=torch.long))
    view = world.grid_view()
    assert isinstance(world, Drawable)
    assert (list(view.cells.shape), view.agents.tolist()) == ([3, 1, 4], [[0, 1]] * 3)
    assert [view.kinds[kind] for kind in view.cells[:, 0, 0]] == [["zero", "one"][bit] for bit in world.bit]
