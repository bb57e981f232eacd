import torch

from helpers.law_results import WRITE, make_laws
from holdfast.check.compare import expect_close, expect_zero
from holdfast.check.laws import LAWS
from holdfast.check.results import Law, Laws, Measurement
from holdfast.report.check_report import as_text, bound, number, split_finding, summary


def test_summary_is_one_sentence():
    assert summary(make_laws()) == "All 10 laws of memory hold."
    assert summary(make_laws("cut")) == "1 of 10 laws of memory is broken: cut."
    assert summary(make_laws("cut", "pure")) == "2 of 10 laws of memory are broken: cut, pure."


def test_location_is_split_from_size_for_every_comparison():
    diff = torch.zeros(2, 3)
    diff[1, 2] = 0.5
    for part in (expect_zero("x", diff, "agent", "step"), expect_close("x", diff, torch.zeros(2, 3), 1e-9)):
        where, size = split_finding(part)
        assert where == "agent 1, step 2"
        assert size.startswith("5.0e-01, must be ")


def test_number_and_bound_format():
    assert (number(0.0), number(1.23e-7), number(float("nan"))) == ("0", "1.2e-07", "nan")
    assert bound(Measurement("x", 0.0, 0.0, "more than")) == "> 0"
    assert bound(Measurement("x", 0.0, 1e-5)) == "≤ 1e-05"
    assert bound(Measurement("x", 0.0, 0.0)) == "= 0"
    lost = Measurement("x", 0.0, 0.0, "more than", "agent 0 carries nothing")
    assert split_finding(lost) == ("agent 0 carries nothing", "0, must be more than 0")


def test_text_has_table_findings_patterns_and_notes():
    lines = as_text(make_laws("clear", notes=["not measured in float64"])).splitlines()
    rows = {line.split()[0]: line for line in lines[1:11]}
    assert list(rows) == list(LAWS)
    assert "✗" in rows["clear"]
    assert "✓" not in rows["clear"]
    assert all("✓" in rows[name] for name in LAWS if name != "clear")
    assert lines[11:] == [
        "",
        "clear: clear, rollout: agent 3, step 5, values: 1.5e-02, must be 0 (2 more like it)",
        "",
        "pattern (clear): state never reset",
        f"  write: {WRITE}",
        "",
        "note: not measured in float64",
    ]


def test_unexplained_law_says_no_known_pattern():
    lines = as_text(make_laws("clear", explained=False)).splitlines()
    assert lines[-1] == "pattern (clear): no known pattern explains these numbers"


def test_text_does_not_interpret_rich_markup():
    text = as_text(Laws([Law("cut", [Measurement("[red]x[/] of [B,T]", 1.0, 0.0, finding="[b]here")])]))
    assert text.count("[red]x[/] of [B,T]") == 2
    assert "[b]here" in text
