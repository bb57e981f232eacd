"""`holdfast check world:NAME`: keys, exit codes, and one line for a wrong call."""

import json

import pytest
import torch

from holdfast.cli import check, main
from holdfast.cli.target import find_world
from holdfast.worlds import WORLDS, Recall

LAWS = ["kind", "first", "flags", "last", "dead", "still", "repeat", "isolate", "pure"]

pytestmark = pytest.mark.usefixtures("annotations_asleep")


@pytest.fixture
def forgetful(monkeypatch):
    """Let `recall` forget that reset() opens an episode."""

    class Forgets(Recall):
        def reset(self):
            step = super().reset()
            object.__setattr__(step, "first", torch.zeros_like(step.first))
            return step

    monkeypatch.setitem(WORLDS, "recall", Forgets)


def test_a_right_world_is_told_in_a_table(capsys):
    assert main(["check", "world:recall", "world.delay=4", "world.truncate=true", "seed=3"]) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert [line.split()[0] for line in lines[:10]] == ["law", *LAWS]
    assert all("✓" in line for line in lines[1:10])
    # An episode lasts delay + 2 steps.
    assert lines[10:] == ["", "note: 24 agents lived 143 steps; 552 episodes ended, 552 by truncation"]


def test_a_broken_one_is_told_where(forgetful, capsys):
    assert main(["check", "--world", "recall", "--steps", "30"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[11].startswith("first: rows without first after reset(): agent 0, step 0; set first")
    assert lines[11].endswith(": 24, must be 0 (1 more like it)")
    assert not any("pattern" in line for line in lines)


def test_json_is_the_same_as_for_policies(forgetful, capsys):
    assert main(["check", "world:recall", "--json", "world.cues=3", "--steps", "30"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], list(told["laws"])) == (False, LAWS)
    first = told["laws"]["first"]
    assert (first["measured"], first["bound"], first["ok"], first["pattern"]) == (24.0, 0.0, False, None)
    assert [part["ok"] for part in first["parts"]] == [False, False]
    assert told["laws"]["flags"]["ok"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["world:recal"], "world.name=recal: there is no such world; did you mean recall?"),
        (["--world", "recal"], "did you mean recall?"),
        (["world:recall", "world.dealy=4"], "There is no key 'world.dealy'; did you mean world.delay?"),
        (["world:recall", "delay=4"], "did you mean world.delay?"),
        (["world:recall", "world.delay=x"], "world.delay=x: "),
        (["world:recall", "world.cues=1"], "world.cues=1: "),
        (["world:recall", "world.cues=3", "world.cues=4"], "world.cues is given twice"),
        (["world:recall", "world=parity"], "world=parity names a world beside world:recall; which"),
        (["world:recall", "trainer.batch_size=8"], "trainer.batch_size=8 says nothing of a world"),
        (["world:recall", "policy.name=fast"], "policy.name=fast says nothing of a world"),
        (["world:arena", "world.agents=5"], "world.agents=5: "),
        (["world:recall", "--steps", "0"], "steps=0: give at least 1"),
        (["world:recall", "--steps", "many"], "argument --steps: invalid int value"),
        (["world:recall", "--obs", "4"], "--obs is for foreign policies"),
        (["world:recall", "--html"], "a world has none; leave out --html."),
        (["world:recall", "fast"], "Name one thing to check, not both world:recall and fast; see"),
        (["world:recall", "--policy", "fast"], "Name one thing to check, not both world:recall and fast."),
        (["world:"], "holdfast check world:recall world.delay=4"),
        (["fast", "world.delay=4"], "world.delay is for worlds"),
        (["fast", "--steps", "4"], "--steps is for worlds"),
        (["--json"], "Name one thing to check, for example: holdfast check fast"),
    ],
)
def test_a_wrong_call_is_one_line(words, told, capsys):
    assert main(["check", *words]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert told in said.err


def test_keys_may_stand_before_and_after_options(monkeypatch):
    found = []
    monkeypatch.setattr(check, "find_world", lambda *given: found.append(given) or 1 / 0)
    for words in (
        ["world:recall", "world.cues=3", "--json", "--steps", "9", "seed=1"],
        ["--json", "--world", "recall", "--steps", "9", "world.cues=3", "seed=1"],
        ["--steps", "9", "--world", "world:recall", "world.cues=3", "--json", "seed=1"],
    ):
        with pytest.raises(ZeroDivisionError):
            main(["check", *words])
    assert found == [("world:recall", {"world.cues": "3", "seed": "1"}, 9)] * 3


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_every_world_can_be_named(name):
    found = find_world(f"world:{name}", {"seed": "4"})
    assert (found.agents, found.steps, found.seed) == (None, None, 4)
    world = found.make(48, 9)
    assert (type(world), world.agents, world.seed) == (WORLDS[name], 48, 9)
    assert find_world(f"world:{name}", {"world.agents": "72"}).agents == 72
