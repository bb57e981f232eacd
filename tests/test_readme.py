"""What the README says works as it stands there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
SHORT = ["trainer.total_timesteps=64", "world.agents=4", "trainer.bptt_horizon=8", "trainer.batch_size=64"]
SHORT += ["trainer.minibatch_size=32", "trainer.eval_episodes=4", "run=mine"]


@pytest.fixture
def folder(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    return tmp_path


def holdfast(folder, *words):
    """Call the installed command: unlike `python -c`, it does not look where one stands by itself."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [str(Path(sys.executable).parent / "holdfast"), *words]
    return subprocess.run(
        command, cwd=folder, env=environment | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )


def test_the_policy_in_the_readme_is_checked_and_trained_where_it_lies(folder):
    checked = holdfast(folder, "check", "mine:Mine")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.count("✓") == 9
    trained = holdfast(folder, "train", "policy=mine:Mine", *SHORT)
    assert (trained.returncode, trained.stderr) == (0, "")
    assert (folder / "runs" / "mine" / "checkpoints" / "latest" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("super().__init__(32,", "super().__init__(33,", "Is input_size the size of what encode returns"),
        ("len(spec.action_names)", "len(spec.action_names) + 1", "scores 5 actions; the world has 4"),
        ("def encode", "def encod", "lacks encode"),
        ("import torch\n", "import torch\nimport torc\n", "mine imports it"),
    ],
    ids=["width", "actions", "misspelt", "import"],
)
def test_a_mistake_in_it_is_one_line(folder, old, new, told):
    text = (folder / "mine.py").read_text()
    assert old in text
    (folder / "mine.py").write_text(text.replace(old, new, 1))
    for words in (["train", "policy=mine:Mine", *SHORT], ["check", "mine:Mine"]):
        said = holdfast(folder, *words)
        assert said.returncode in (1, 2)
        assert told in said.stderr
        assert len(said.stderr.splitlines()) == 1


def test_the_functions_in_the_guide_to_the_check_obey_the_laws(annotations_asleep):
    guide = (Path(__file__).parent.parent / "docs" / "check.md").read_text()
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "Callables(" in each]
    names = {}
    exec(block, names)
    assert names["laws"].ok
