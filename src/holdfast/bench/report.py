"""Text of a benchmark: a line for each result, and a table at the end."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from holdfast.bench.cases import Case
from holdfast.bench.memory import CaseResult, ImplementationResult
from holdfast.bench.processes import SIZES
from holdfast.report.text import short_number

FASTER, MARK = "x float16", ""
OPTIONAL = ("first", "1e4", "timed")
"""Columns that a narrow terminal drops, in this order."""
WRAPPED = ("case", "ms")
"""Columns that may wrap."""
WRAPPED_WIDTH = 24
"""Minimum width of these columns together."""
GAP = 2


def meaning(outcomes: Sequence[CaseResult]) -> str:
    """Describe the columns."""
    faster = f"{FASTER}: speedup over that call in float16 · " if _on_gpu(outcomes) else ""
    return (
        "ms: forward and backward, median [10th - 90th percentile] · of dense: time relative to torch's "
        f"dense call without resets, same precision · {faster}output, gradient: errors against float64, "
        "relative to the largest entry · 1e4: result of inputs that large · first: seconds of the first "
        "call, with compilation and autotuning"
    )


def lines_of(outcome: CaseResult) -> Iterator[str]:
    """Yield a line for each result of a case."""
    for result in outcome.measured:
        cells = _cells(result)
        words = [cells["implementation"], cells["in"], f"{cells['ms']} ms ({cells['timed']})"]
        words += [f"{cells[name]} {name}" for name in ("of dense", FASTER) if cells[name]]
        words += [f"errors {cells['output']} {cells['gradient']}", f"1e4 {cells['1e4']}"]
        words += [f"first {cells['first']} s", "" if result.right else cells[MARK]]
        yield f"{outcome.case}: {' · '.join(word for word in words if word)}"
        if result.why_eager:
            yield f"{outcome.case}: {result.name} {result.precision} is timed eagerly: {result.why_eager}"


def speed_table(outcomes: Sequence[CaseResult], width: int) -> Table:
    """Return a table of all results, with the columns that fit the width."""
    rows = [
        {"case": "" if index else str(outcome.case), **_cells(result)}
        for outcome in outcomes
        for index, result in enumerate(outcome.measured)
    ]
    columns = {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}
    if not _on_gpu(outcomes):
        columns.pop(FASTER, None)
    for name in OPTIONAL:
        if _width(columns) > width:
            columns.pop(name, None)
    if _width({name: cells for name, cells in columns.items() if name not in WRAPPED}) + WRAPPED_WIDTH > width:
        columns.pop(FASTER, None)
    table = Table(box=None, padding=(0, GAP, 0, 0))
    for name in columns:
        left = name in ("case", "implementation", "in")
        table.add_column(name, no_wrap=name not in WRAPPED, justify="left" if left else "right")
    for row in zip(*columns.values(), strict=True):
        table.add_row(*(_coloured(cell) for cell in row))
    return table


def _on_gpu(outcomes: Sequence[CaseResult]) -> bool:
    """Return whether any result has a speedup over the dense call in float16."""
    return any(result.faster is not None for outcome in outcomes for result in outcome.measured)


def _width(columns: dict[str, list[str]]) -> int:
    return sum(GAP + max(len(cell) for cell in (name, *cells)) for name, cells in columns.items())


def _coloured(cell: str) -> Text:
    return Text(cell, {"✓": "green", "✗": "red"}.get(cell, ""))


def processes_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of several processes: median, minimum and maximum of their medians."""
    table = Table(box=None, padding=(0, GAP, 0, 0))
    for name in ("case", "implementation", "in", "processes", "ms", "of dense", ""):
        table.add_column(name, no_wrap=name not in (*WRAPPED, "of dense"))
    for row in rows:
        case = Case(**{size: row[size] for size in SIZES})
        ms, of_dense = (
            "" if row[name] is None else _with_range(row[name], row[f"{name}_least"], row[f"{name}_most"])
            for name in ("ms_median", "of_dense")
        )
        mark = _coloured("✓" if row["right"] else "✗")
        table.add_row(str(case), row["implementation"], row["precision"], str(row["processes"]), ms, of_dense, mark)
    return table


def _with_range(middle: float, low: float, high: float) -> str:
    return f"{short_number(middle, 3)} [{short_number(low, 3)} - {short_number(high, 3)}]"


def _cells(result: ImplementationResult) -> dict[str, str]:
    """Return the cells of a row by column."""
    return {
        "implementation": result.name,
        "in": result.precision,
        "ms": _with_range(result.times.median, *result.times.spread),
        "timed": result.how,
        "of dense": "" if result.of_dense is None else f"{result.of_dense:.2f}",
        FASTER: "" if result.faster is None else f"{result.faster:.2f}",
        "output": f"{result.output_error:.0e}",
        "gradient": f"{result.gradient_error:.0e}",
        MARK: "✓" if result.right else "✗",
        "1e4": result.at_huge,
        "first": f"{result.first_seconds:.1f}",
    }
