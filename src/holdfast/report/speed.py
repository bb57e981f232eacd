"""A bench in words: a line for each rival as it is measured, and a table in the end."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from holdfast.bench import Case, Measured, Outcome
from holdfast.bench.processes import SIZES

MEANING = (
    "ms: forwards and backwards, median [one in ten below - one in ten above] · of dense: time over torch's "
    "dense call without clears, same precision · x float16: times as fast as that call in float16 · errors "
    "against float64, of the largest entry · 1e4: what becomes of inputs that large · first: the first call, "
    "compiling and tuning"
)


def lines_of(outcome: Outcome) -> Iterator[str]:
    """Tell a case, a line each."""
    for each in outcome.measured:
        cells = dict(zip(_columns(), _cells(each), strict=True))
        told = [cells["rival"], cells["in"], f"{cells['ms']} ms ({cells['timed']})"]
        told += [f"{cells[name]} {name}" for name in ("of dense", "x float16") if cells[name]]
        told += [f"errors {cells['output']} {cells['gradient']}", f"1e4 {cells['1e4']}"]
        told += [f"first {cells['first']} s", "" if each.right else "✗"]
        yield f"{outcome.case}: {' · '.join(part for part in told if part)}"
        if each.why_eager:
            yield f"{outcome.case}: {each.name} {each.precision} is timed eagerly: {each.why_eager}"


def speed_table(outcomes: Sequence[Outcome]) -> Table:
    """Lay all cases out, a line for each rival."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("case", *_columns()):
        table.add_column(name, no_wrap=True, justify="left" if name in ("case", "rival", "in") else "right")
    for outcome in outcomes:
        name = str(outcome.case)
        for each in outcome.measured:
            right = Text(" ✓", "green") if each.right else Text(" ✗", "red")
            *cells, at_huge, first = _cells(each)
            table.add_row(name, *cells, Text(at_huge) + right, first)
            name = ""
    return table


def processes_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Lay out what several processes found: medians of their medians, the least and the most of them."""
    names = ("case", "rival", "in", "processes", "ms", "of dense", "")
    table = Table(*names, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        case = Case(**{size: row[size] for size in SIZES})
        right = Text("✓", "green") if row["right"] else Text("✗", "red")
        ms, of_dense = (_between(row, name) for name in ("ms_median", "of_dense"))
        table.add_row(str(case), row["rival"], row["precision"], str(row["processes"]), ms, of_dense, right)
    return table


def _between(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return ""
    return f"{row[name]:.3g} [{row[f'{name}_least']:.3g} - {row[f'{name}_most']:.3g}]"


def _columns() -> tuple[str, ...]:
    return ("rival", "in", "ms", "timed", "of dense", "x float16", "output", "gradient", "1e4", "first")


def _cells(each: Measured) -> list[str]:
    low, high = each.times.spread
    return [
        each.name,
        each.precision,
        f"{each.times.median:.3g} [{low:.3g} - {high:.3g}]",
        each.how,
        "" if each.of_dense is None else f"{each.of_dense:.2f}",
        "" if each.faster is None else f"{each.faster:.2f}",
        f"{each.output_error:.0e}",
        f"{each.gradient_error:.0e}",
        each.at_huge,
        f"{each.first_seconds:.1f}",
    ]
