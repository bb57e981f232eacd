import json

import pytest
from rich.console import Console

from holdfast.check.subjects.find import subject_of
from holdfast.cli import check, main
from small import OnlySpec, make_small
from verdicts import WRITE, make_laws, make_reach


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Let `holdfast check` find what it is told to, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def find(*broken):
        laws = make_laws(*broken, notes=["not measured in float64"], reach=make_reach())
        monkeypatch.setattr(check, "_measure", lambda subject, screen, conditions: laws)

    return find


def test_a_broken_law_is_told_below_the_table(measured, capsys, tmp_path):
    measured("clear")
    assert main(["check", "fast"]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("law ")
    assert lines[10:] == [
        "",
        "clear: clear, lived: agent 3, step 5, values: 1.5e-02, must be 0 (2 more like it)",
        "",
        "pattern (clear): memory is never cleared",
        f"  write: {WRITE}",
        "",
        "note: not measured in float64",
    ]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["fast", "--html"], "check-fast.html"),
        (["holdfast.policies:Fast", "--html"], "check-holdfast.policies-Fast.html"),
        (["fast", "--html", "mine.html"], "mine.html"),
    ],
)
def test_a_page_is_written_and_said_where(measured, capsys, tmp_path, words, name):
    measured()
    assert main(["check", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"page {name}"
    (page,) = tmp_path.iterdir()
    assert page.name == name
    text = page.read_text(encoding="utf-8")
    assert f"<h1>The memory of {words[0]}</h1>" in text
    assert "data:image/png;base64," in text


def test_json_stays_json_beside_a_page(measured, capsys, tmp_path):
    measured("cut")
    assert main(["check", "fast", "--json", "--html"]) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert (told["ok"], told["laws"]["cut"]["write"], told["notes"]) == (
        False,
        WRITE,
        ["not measured in float64"],
    )
    assert said.err == "page check-fast.html\n"


@pytest.mark.parametrize("file", ["nowhere/x.html", "."])
def test_a_page_that_cannot_be_written_is_told_before_anything_is_measured(measured, capsys, file):
    assert main(["check", "fast", "--html", file]) == 2
    said = capsys.readouterr().err
    assert said == f"holdfast: {file} cannot be written; name a file in a folder that exists: --html FILE.\n"


@pytest.mark.usefixtures("annotations_asleep")
def test_laws_are_measured_and_explained():
    import torch

    from small import Small

    class NoClear(Small):
        def unroll(self, obs, first, state, valid=None):
            return super().unroll(obs, torch.zeros_like(first), state, valid)

    laws = check._measure(subject_of(make_small(NoClear), OnlySpec()), Console(quiet=True))
    assert {name: law.finding for name, law in laws.items() if not law.ok and name != "clear"} == {}
    assert not laws["clear"].ok
    assert laws["clear"].pattern is not None
    assert laws.reach is not None
    assert len(laws) == 9
