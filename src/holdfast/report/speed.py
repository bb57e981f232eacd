"""A bench in words: a line for each rival as it is measured, and a table in the end."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from holdfast.bench import Case, Measured, Outcome
from holdfast.bench.processes import SIZES
from holdfast.report.numbers import short

FASTER, MARK = "x float16", ""
COLUMNS = ("rival", "in", "ms", "timed", "of dense", FASTER, "output", "gradient", MARK, "1e4", "first")
SPARED = ("first", "1e4", "timed")
"""What a narrow terminal does without, in this order."""
WRAPPED = ("case", "ms")
"""What may go over several lines."""
WRAPPED_WIDTH = 24
"""What these two take at least, together."""
GAP = 2


def meaning(outcomes: Sequence[Outcome]) -> str:
    """Say what the columns are."""
    faster = f"{FASTER}: times as fast as that call in float16 · " if _on_gpu(outcomes) else ""
    return (
        "ms: forwards and backwards, median [one in ten below - one in ten above] · of dense: time over "
        f"torch's dense call without clears, same precision · {faster}output, gradient: errors against "
        "float64, of the largest entry · 1e4: what becomes of inputs that large · first: seconds of the "
        "first call, compiling and tuning"
    )


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Tell a case, a line each."""
    for each in outcome.measured:
        cells = dict(zip(COLUMNS, _cells(each), strict=True))
        told = [cells["rival"], cells["in"], f"{cells['ms']} ms ({cells['timed']})"]
        told += [f"{cells[name]} {name}" for name in ("of dense", FASTER) if cells[name]]
        told += [f"errors {cells['output']} {cells['gradient']}", f"1e4 {cells['1e4']}"]
        told += [f"first {cells['first']} s", "" if each.right else cells[MARK]]
        yield f"{outcome.case}: {' · '.join(part for part in told if part)}"
        if each.why_eager:
            yield f"{outcome.case}: {each.name} {each.precision} is timed eagerly: {each.why_eager}"


def speed_table(outcomes: Sequence[Outcome], width: int) -> Table:
    """Lay all cases out, a line for each rival, in columns that fit into this width."""
    lines = [
        ("" if number else str(outcome.case), *_cells(each))
        for outcome in outcomes
        for number, each in enumerate(outcome.measured)
    ]
    names: tuple[str, ...] = ("case", *COLUMNS) if lines else ()
    laid = {name: list(cells) for name, cells in zip(names, zip(*lines, strict=True), strict=True)}
    if not _on_gpu(outcomes):
        laid.pop(FASTER, None)
    for name in SPARED:
        if _width(laid) > width:
            laid.pop(name, None)
    if _width({name: cells for name, cells in laid.items() if name not in WRAPPED}) + WRAPPED_WIDTH > width:
        laid.pop(FASTER, None)
    table = Table(box=None, padding=(0, GAP, 0, 0))
    for name in laid:
        left = name in ("case", "rival", "in")
        table.add_column(name, no_wrap=name not in WRAPPED, justify="left" if left else "right")
    for row in zip(*laid.values(), strict=True):
        table.add_row(*(_coloured(cell) for cell in row))
    return table


def _on_gpu(outcomes: Sequence[Outcome]) -> bool:
    """Say whether anything was held against a GPU's dense call in float16."""
    return any(each.faster is not None for outcome in outcomes for each in outcome.measured)


def _width(laid: dict[str, list[str]]) -> int:
    return sum(GAP + max(len(cell) for cell in (name, *cells)) for name, cells in laid.items())


def _coloured(cell: str) -> Text:
    return Text(cell, {"✓": "green", "✗": "red"}.get(cell, ""))


def processes_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Lay out what several processes found: medians of their medians, the least and the most of them."""
    names = ("case", "rival", "in", "processes", "ms", "of dense", "")
    table = Table(box=None, padding=(0, GAP, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=name not in (*WRAPPED, "of dense"))
    for row in rows:
        case = Case(**{size: row[size] for size in SIZES})
        right = Text("✓", "green") if row["right"] else Text("✗", "red")
        ms, of_dense = (_between(row, name) for name in ("ms_median", "of_dense"))
        table.add_row(str(case), row["rival"], row["precision"], str(row["processes"]), ms, of_dense, right)
    return table


def _between(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return ""
    return _of(row[name], row[f"{name}_least"], row[f"{name}_most"])


def _of(middle: float, low: float, high: float) -> str:
    return f"{short(middle, 3)} [{short(low, 3)} - {short(high, 3)}]"


def _cells(each: Measured) -> list[str]:
    low, high = each.times.spread
    return [
        each.name,
        each.precision,
        _of(each.times.median, low, high),
        each.how,
        "" if each.of_dense is None else f"{each.of_dense:.2f}",
        "" if each.faster is None else f"{each.faster:.2f}",
        f"{each.output_error:.0e}",
        f"{each.gradient_error:.0e}",
        "✓" if each.right else "✗",
        each.at_huge,
        f"{each.first_seconds:.1f}",
    ]
