import torch

from holdfast.check.compare import close, nothing
from holdfast.check.laws import LAWS
from holdfast.check.results import Law, Laws, Measurement
from holdfast.report.verdict import IN_WORDS, as_text, bound, finding, number, summary
from verdicts import WRITE, make_laws


def test_every_law_is_told_in_words():
    assert list(IN_WORDS) == list(LAWS)


def test_the_verdict_is_one_sentence():
    assert summary(make_laws()) == "All 9 laws of memory hold."
    assert summary(make_laws("cut")) == "1 of 9 laws of memory is broken: cut."
    assert summary(make_laws("cut", "pure")) == "2 of 9 laws of memory are broken: cut, pure."


def test_a_finding_is_taken_apart():
    found = finding(make_laws("clear")["clear"])
    assert (found.what, found.where, found.size) == (
        "clear, lived",
        "agent 3, step 5, values",
        "1.5e-02, must be 0",
    )
    assert (found.pattern, found.write, found.more) == ("memory is never cleared", WRITE, 2)


def test_where_it_is_comes_without_its_size_whoever_measured_it():
    moved = torch.zeros(2, 3)
    moved[1, 2] = 0.5
    for part in (nothing("x", moved, "agent", "step"), close("x", moved, torch.zeros(2, 3), 1e-9)):
        found = finding(Law("pure", [part]))
        assert found.where == "agent 1, step 2"
        assert found.size.startswith("5.0e-01, must be ")
        assert found.more == 0


def test_numbers_and_bounds_read_well():
    assert (number(0.0), number(1.23e-7), number(float("nan"))) == ("0", "1.2e-07", "nan")
    assert bound(Measurement("x", 0.0, 0.0, "more than")) == "> 0"
    assert bound(Measurement("x", 0.0, 1e-5)) == "≤ 1e-05"
    lost = finding(Law("carry", [Measurement("x", 0.0, 0.0, "more than", "agent 0 feels nothing")]))
    assert (lost.where, lost.size) == ("agent 0 feels nothing", "0, must be more than 0")


def test_the_text_has_the_table_and_lines_of_their_own():
    lines = as_text(make_laws("clear", notes=["not measured in float64"])).splitlines()
    rows = {line.split()[0]: line for line in lines[1:10]}
    assert list(rows) == list(LAWS)
    assert "✗" in rows["clear"]
    assert "✓" not in rows["clear"]
    assert all("✓" in rows[name] for name in LAWS if name != "clear")
    assert lines[10:] == [
        "",
        "clear: clear, lived: agent 3, step 5, values: 1.5e-02, must be 0 (2 more like it)",
        "",
        "pattern (clear): memory is never cleared",
        f"  write: {WRITE}",
        "",
        "note: not measured in float64",
    ]


def test_what_nothing_explains_is_said_so():
    lines = as_text(make_laws("clear", explained=False)).splitlines()
    assert lines[-1] == "pattern (clear): none we know explains these numbers"


def test_brackets_in_a_measurement_are_brackets():
    text = as_text(Laws([Law("cut", [Measurement("[red]x[/] of [B,T]", 1.0, 0.0, finding="[b]here")])]))
    assert text.count("[red]x[/] of [B,T]") == 2
    assert "[b]here" in text
