"""The code of docs/guides/python.md and of examples/train.ipynb runs as printed."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import holdfast

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "python.md").read_text()
NOTEBOOK = json.loads((ROOT / "examples" / "train.ipynb").read_text())


def python_block(marker):
    """Return the one Python block of the guide that contains a marker."""
    (block,) = [code for code in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if marker in code]
    return block


def statements(code):
    return [line for line in code.splitlines() if line.strip()]


@pytest.fixture(autouse=True)
def in_a_new_folder(tmp_path, monkeypatch, annotations_asleep):
    monkeypatch.chdir(tmp_path)


def test_notebook_runs():
    """Its cells are plain Python, so no kernel is needed to run them."""
    names = {}
    for cell in NOTEBOOK["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    run = names["run"]
    assert run.finished
    assert run.policy is names["policy"]
    assert run.metrics["custom/progress"].tolist() == [0.5, 1.0]
    assert np.isfinite(run.metrics["charts/episodic_return"]).all()


def test_notebook_is_valid_and_holds_no_outputs():
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    for cell in NOTEBOOK["cells"]:
        assert {"cell_type", "id", "metadata", "source"} <= cell.keys()
        assert (cell.get("outputs", []), cell.get("execution_count")) == ([], None)
    assert len({cell["id"] for cell in NOTEBOOK["cells"]}) == len(NOTEBOOK["cells"])


def test_first_example_is_fifteen_lines_and_runs(monkeypatch):
    code = python_block("stop_when_solved")
    assert len(statements(code)) <= 15
    small = '"trainer.total_timesteps": 256, "trainer.batch_size": 128, "report": "off", "trainer.eval_episodes": 2'
    short = code.replace('"trainer.total_timesteps": 4096', f'{small}, "trainer.minibatch_size": 64')
    assert short != code
    names = {}
    exec(short, names)
    assert names["run"].metrics["custom/progress"].tolist() == [0.5, 1.0]


def test_own_loop_is_fifteen_lines_and_trains():
    code = python_block("holdfast.Collector(")
    assert len(statements(code)) <= 15
    names = {}
    exec(code, names)
    assert names["losses"]["memory/replay_error"] <= 1e-5
    assert names["losses"]["charts/gradient_steps"] > 0


def test_loop_with_a_trainer_trains():
    names = {}
    exec(python_block("holdfast.Trainer("), names)
    assert names["trainer"].iteration == 2
    assert names["trainer"].value("trainer.ppo.ent_coef") == 0.01
    assert names["metrics"]["memory/replay_error"] <= 1e-5


def test_help_is_short_and_names_everything_public(capsys):
    help(holdfast)
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 200
    assert [name for name in dir(holdfast) if name not in text and name != "__version__"] == []
