import json

import pytest

import holdfast
from helpers.law_results import WRITE, make_laws, make_reach
from helpers.small_policy import OnlySpec, make_small
from holdfast.cli import check, main


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Replace the measurement of `holdfast check` by chosen laws, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def set_laws(*broken):
        laws = make_laws(*broken, notes=["not measured in float64"], reach=make_reach())
        monkeypatch.setattr(check, "run_laws", lambda *_, **__: laws)

    return set_laws


def test_findings_patterns_and_notes_are_printed_below_the_table(measured, capsys, tmp_path):
    measured("clear")
    assert main(["check", "fast"]) == 1
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("law ")
    assert lines[11:] == [
        "",
        "clear: clear, rollout: agent 3, step 5, values: 1.5e-02, must be 0 (2 more like it)",
        "",
        "pattern (clear): state never reset",
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
def test_html_writes_a_page_and_prints_its_name(measured, capsys, tmp_path, words, name):
    measured()
    assert main(["check", *words]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"page {name}"
    (page,) = tmp_path.iterdir()
    assert page.name == name
    text = page.read_text(encoding="utf-8")
    assert f"<h1>The memory of {words[0]}</h1>" in text
    assert "data:image/png;base64," in text


def test_json_output_with_html_is_valid_json(measured, capsys, tmp_path):
    measured("cut")
    assert main(["check", "fast", "--json", "--html"]) == 1
    captured = capsys.readouterr()
    results = json.loads(captured.out)
    assert (results["ok"], results["laws"]["cut"]["write"], results["notes"]) == (
        False,
        WRITE,
        ["not measured in float64"],
    )
    assert captured.err == "page check-fast.html\n"


@pytest.mark.parametrize("file", ["nowhere/x.html", "."])
def test_unwritable_html_path_is_an_error_before_measuring(measured, capsys, file):
    assert main(["check", "fast", "--html", file]) == 2
    error = capsys.readouterr().err
    assert error == f"holdfast: {file} cannot be written; name a file in a folder that exists: --html FILE.\n"


@pytest.mark.usefixtures("annotations_asleep")
def test_policy_without_reset_breaks_clear_with_a_pattern():
    import torch

    from helpers.small_policy import Small

    class NoClear(Small):
        def unroll(self, obs, first, state, valid=None):
            return super().unroll(obs, torch.zeros_like(first), state, valid)

    laws = holdfast.check(make_small(NoClear), OnlySpec())
    assert {name: law.finding for name, law in laws.items() if not law.ok and name != "clear"} == {}
    assert not laws["clear"].ok
    assert laws["clear"].pattern is not None
    assert laws.reach is not None
    assert len(laws) == 10


def test_progress_is_printed_every_ten_seconds_where_there_is_no_terminal(capsys, monkeypatch):
    clock = iter([0.0, 5.0, 10.0, 10.0, 15.0, 20.0, 20.0])
    monkeypatch.setattr(check.time, "monotonic", lambda: next(clock))
    progress = check.PlainProgress()
    for text in ("a", "b", "c", "d"):
        progress(text)
    assert capsys.readouterr().err == "holdfast: b\nholdfast: d\n"
