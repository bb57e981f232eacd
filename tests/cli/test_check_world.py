"""`holdfast check world:NAME`: keys, exit codes, and one line for a wrong call."""

import json

import pytest
import torch

from holdfast.cli import check, main
from holdfast.cli.check import find_world
from holdfast.config.worlds import WORLD_CONFIGS
from holdfast.worlds import Recall, make_world

LAWS = ["kind", "first", "flags", "last", "dead", "still", "repeat", "isolate", "pure"]

pytestmark = pytest.mark.usefixtures("annotations_asleep")


@pytest.fixture
def without_first(monkeypatch):
    """Make `recall` leave `first` unset in reset()."""

    correct = Recall.reset

    def reset(self):
        step = correct(self)
        object.__setattr__(step, "first", torch.zeros_like(step.first))
        return step

    monkeypatch.setattr(Recall, "reset", reset)


def test_correct_world_prints_a_table_and_exits_0(capsys):
    assert main(["check", "world:recall", "world.delay=4", "world.truncate=true", "seed=3"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[0] for line in lines[:10]] == ["law", *LAWS]
    # All agents of this world are always valid.
    assert [line.split()[0] for line in lines[1:10] if "✓" not in line] == ["dead"]
    # An episode lasts delay + 2 steps.
    assert lines[10:] == ["", "note: 24 agents, 143 steps; 552 episodes ended, 552 by truncation"]


def test_broken_world_prints_the_first_row_and_exits_1(without_first, capsys):
    assert main(["check", "--world", "recall", "--steps", "30"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[11].startswith("first: rows without first after reset(): agent 0, step 0; set first")
    assert lines[11].endswith(": 24, must be 0 (1 more like it)")
    assert not any("pattern" in line for line in lines)


def test_json_of_a_world_has_the_keys_of_a_policy(without_first, capsys):
    assert main(["check", "world:recall", "--json", "world.cues=3", "--steps", "30"]) == 1
    results = json.loads(capsys.readouterr().out)
    assert (results["ok"], list(results["laws"])) == (False, LAWS)
    first = results["laws"]["first"]
    assert (first["measured"], first["bound"], first["ok"], first["pattern"]) == (24.0, 0.0, False, None)
    assert [part["ok"] for part in first["parts"]] == [False, False]
    assert results["laws"]["flags"]["ok"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["world:recal"], "world.name=recal: there is no such world; did you mean recall?"),
        (["--world", "recal"], "did you mean recall?"),
        (["world:recall", "world.dealy=4"], "There is no key 'world.dealy'; did you mean world.delay?"),
        (["world:recall", "delay=4"], "did you mean world.delay?"),
        (["world:recall", "world.delay=x"], "world.delay=x: "),
        (["world:recall", "world.cues=1"], "world.cues=1: "),
        (["world:recall", "world.cues=3", "world.cues=4"], "world.cues is given twice"),
        (
            ["world:recall", "world=parity"],
            "world=parity names a second world beside world:recall; give one.",
        ),
        (["world:recall", "trainer.batch_size=8"], "trainer.batch_size=8 is not a key of a world"),
        (["world:recall", "policy.name=fast"], "policy.name=fast is not a key of a world"),
        (["world:arena", "world.agents=5"], "world.agents=5: "),
        (["world:recall", "--steps", "0"], "steps=0: give at least 1"),
        (["world:recall", "--steps", "many"], "argument --steps: invalid int value"),
        (["world:recall", "--obs", "4"], "--obs is for policies of other libraries"),
        (["world:recall", "--html"], "a world has none; omit --html."),
        (["world:recall", "fast"], "Name one thing to check, not both world:recall and fast; see"),
        (
            ["world:recall", "--policy", "fast"],
            "Name one thing to check, not both world:recall and fast; see",
        ),
        (["world:"], "holdfast check world:recall world.delay=4"),
        (["fast", "--steps", "4"], "--steps is for worlds"),
        (["fast", "policy.kernel=torch"], "write --kernel"),
        (["--json"], "Name one thing to check, for example: holdfast check fast"),
    ],
)
def test_wrong_arguments_are_one_line_on_stderr(words, message, capsys):
    assert main(["check", *words]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert message in captured.err


def test_keys_before_and_after_options(monkeypatch):
    calls = []
    monkeypatch.setattr(check, "find_world", lambda *args: calls.append(args) or 1 / 0)
    for words in (
        ["world:recall", "world.cues=3", "--json", "--steps", "9", "seed=1"],
        ["--json", "--world", "recall", "--steps", "9", "world.cues=3", "seed=1"],
        ["--steps", "9", "--world", "world:recall", "world.cues=3", "--json", "seed=1"],
    ):
        with pytest.raises(ZeroDivisionError):
            main(["check", *words])
    assert calls == [("world:recall", {"world.cues": "3", "seed": "1"}, 9)] * 3


@pytest.mark.parametrize("name", sorted(WORLD_CONFIGS))
def test_every_world_can_be_a_target(name):
    target = find_world(f"world:{name}", {"seed": "4"})
    assert (target.agents, target.steps, target.seed) == (None, None, 4)
    world = target.make(48, 9)
    assert (type(world), world.agents, world.seed) == (type(make_world(name, 48)), 48, 9)
    assert find_world(f"world:{name}", {"world.agents": "72"}).agents == 72
