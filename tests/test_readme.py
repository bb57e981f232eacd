"""The code in the README and in the guides works as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from helpers.one_update import learn_from
from holdfast.cli import main
from holdfast.rollout import Collector

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
GUIDES = ROOT / "docs" / "guides"
SHORT = ["trainer.total_timesteps=64", "world.agents=4", "trainer.bptt_horizon=8", "trainer.batch_size=64"]
SHORT += ["trainer.minibatch_size=32", "trainer.eval_episodes=4", "report=off", "run=mine"]


def python_block(text, marker=""):
    """Return the one Python block that contains a marker."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if marker in code]
    return block


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(python_block(README, "class Mine"))
    return tmp_path


def holdfast(folder, *args):
    """Call the installed command: unlike `python -c`, it does not add the current directory to the path."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(Path(sys.executable).parent / "holdfast"), *args]
    return subprocess.run(
        command, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900
    )


def test_readme_is_at_most_200_lines():
    assert len(README.splitlines()) <= 200


def test_readme_policy_passes_the_check_and_trains(folder):
    checked = holdfast(folder, "check", "mine:Mine")
    # A busy machine prints what it is measuring.
    errors = re.sub(r"holdfast: (measuring .* of 10\)|diagnosing)\n", "", checked.stderr)
    assert (checked.returncode, errors) == (0, "")
    assert checked.stdout.count("✓") == 10
    trained = holdfast(folder, "train", "policy=mine:Mine", *SHORT)
    assert (trained.returncode, trained.stderr) == (0, "")
    assert (folder / "runs" / "mine" / "checkpoints" / "latest" / "model.safetensors").exists()


def test_readme_training_in_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = '"world.agents": 4, "trainer.batch_size": 512, "trainer.eval_episodes": 4, "trainer.total_timesteps": 1024'
    code, names = python_block(README, "holdfast.train("), {}
    exec(code.replace('"trainer.total_timesteps": 1e5', small), names)
    assert (names["run"].finished, names["run"].summary["iteration"]) == (True, 2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("super().__init__(32,", "super().__init__(33,", "Set input_size to the size that encode returns"),
        ("len(spec.action_names)", "len(spec.action_names) + 1", "gives 5 logits; the world has 4 actions"),
        ("def encode", "def encod", "lacks encode"),
        ("import torch\n", "import torch\nimport torc\n", "mine imports it"),
    ],
    ids=["width", "actions", "misspelt", "import"],
)
def test_mistake_in_the_readme_policy_is_a_one_line_error(
    folder, old, new, message, monkeypatch, capsys, annotations_asleep
):
    text = (folder / "mine.py").read_text()
    assert old in text
    (folder / "mine.py").write_text(text.replace(old, new, 1))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for args in (["train", "policy=mine:Mine", *SHORT], ["check", "mine:Mine"]):
        sys.modules.pop("mine", None)
        assert main(args) in (1, 2)
        error = capsys.readouterr().err
        assert message in error
        assert len(error.splitlines()) == 1
    sys.modules.pop("mine", None)


def test_functions_of_the_check_guide_obey_the_laws(annotations_asleep):
    names = {}
    exec(python_block((GUIDES / "check_your_policy.md").read_text(), "Functions("), names)
    assert names["laws"].ok


def test_forward_of_the_policy_guide_trains_and_obeys_the_laws(annotations_asleep):
    names = {}
    exec(python_block((GUIDES / "write_a_policy.md").read_text(), "class ByHand"), names)
    world = hf.make_world("gym:CartPole-v1", agents=4)
    policy = names["ByHand"](world.spec, hidden_size=8)
    laws = hf.check(policy, world)
    assert laws.ok, [law.finding for law in laws.values() if not law.ok]
    steps = Collector(world, policy, length=16, horizon=8, seed=0).rollout(0)
    assert learn_from(policy, steps)["memory/replay_error"] <= 1e-5


@pytest.mark.slow
def test_cell_of_the_guide_obeys_the_laws(tmp_path, monkeypatch, annotations_asleep):
    (tmp_path / "elman.py").write_text(python_block((GUIDES / "write_a_cell.md").read_text(), "class Elman(Cell)"))
    monkeypatch.syspath_prepend(str(tmp_path))
    world = hf.make_world("recall", agents=1)
    policy = hf.make_policy("fast", world, seed=0, hidden_size=8, num_layers=2, memory="elman:Elman")
    laws = hf.check(policy, world)
    assert laws.ok, [law.finding for law in laws.values() if not law.ok]


def page_name(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=page_name)
def test_relative_links_and_pictures_exist(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    absent = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert absent == []
