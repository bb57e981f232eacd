"""Lines and tables of benchmark results."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from holdfast.bench.cases import Case
from holdfast.bench.memory import CaseResult, ImplementationResult
from holdfast.bench.report import lines_of, meaning, processes_table, speed_table
from holdfast.bench.timing import Times

CASE = Case("lstm", 128, 1024)
RIGHT = ImplementationResult(
    name="holdfast",
    precision="float32",
    clears=True,
    how="graph",
    why_eager="",
    times=Times([1.5, 2.0, 2.5]),
    of_dense=1.25,
    faster=None,
    output_error=3e-7,
    gradient_error=2e-6,
    dense_gradient_error=0.0,
    at_huge="ok",
    first_seconds=7.5,
)
ON_GPU = replace(RIGHT, faster=1.75)


def outcome_of(*results):
    return CaseResult(CASE, results, [])


def text_of(table, width=200):
    console = Console(width=width, file=io.StringIO(), emoji=False)
    console.print(table)
    return console.file.getvalue()


def test_line_has_time_ratio_and_errors():
    (line,) = lines_of(outcome_of(RIGHT))
    low, high = RIGHT.times.spread
    assert line == (
        f"lstm H=128 B=1024 T=64 2 % starts: holdfast · float32 · 2 [{low:g} - {high:g}] ms (graph) · "
        "1.25 of dense · errors 3e-07 2e-06 · 1e4 ok · first 7.5 s"
    )


def test_line_of_a_wrong_result_ends_with_a_mark():
    (line,) = lines_of(outcome_of(replace(RIGHT, output_error=0.1)))
    assert line.endswith(" · ✗")


def test_eager_timing_has_a_line_with_the_reason():
    _, line = lines_of(outcome_of(replace(RIGHT, why_eager="it synchronizes")))
    assert line.endswith("holdfast float32 is timed eagerly: it synchronizes")


def test_speedup_over_float16_is_shown_on_a_gpu_only():
    for result, shown in ((RIGHT, False), (ON_GPU, True)):
        header, row = text_of(speed_table([outcome_of(result)], 200)).splitlines()
        assert ("x float16" in header, "1.75" in row) == (shown, shown)
        assert ("x float16" in meaning([outcome_of(result)])) is shown
        assert any("1.75 x float16" in line for line in lines_of(outcome_of(result))) is shown


def test_case_is_named_in_the_first_row_only():
    table = text_of(speed_table([outcome_of(RIGHT, replace(RIGHT, name="dense"))], 200))
    _, first, second = table.splitlines()
    assert first.startswith(str(CASE))
    assert second.split()[0] == "dense"


@pytest.mark.parametrize(("right", "mark"), [(True, "✓"), (False, "✗")])
def test_processes_table_has_the_range_of_medians(right, mark):
    row = {**vars(CASE), "implementation": "dense", "precision": "float32", "processes": 3, "right": right}
    row |= {"ms_median": 2.0, "ms_median_least": 1.0, "ms_median_most": 4.5, "of_dense": None}
    _, line = text_of(processes_table([row])).splitlines()
    assert line.split("starts")[1].split() == ["dense", "float32", "3", "2", "[1", "-", "4.5]", mark]
