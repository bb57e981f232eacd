"""The results of a check as text."""

from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.check import Law, Laws, Measurement

UNEXPLAINED = "no known pattern explains these numbers"
_SIZES = (" changes by up to ", " is off by up to ")


def split_finding(part: Measurement) -> tuple[str, str]:
    """Split the finding of a broken measurement into location and size; a policy that raised has no size."""
    where = part.finding
    for size in _SIZES:
        where = where.partition(size)[0]
    if part.path == "raised":
        return where, ""
    exact = part.comparison == "at most" and part.bound == 0
    return where, f"{number(part.measured)}, must be {'0' if exact else f'{part.comparison} {_limit(part)}'}"


def number(value: float) -> str:
    """Format a measured number; exact zeros and counts as integers."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e5 else f"{value:.1e}"


def bound(part: Measurement) -> str:
    """Format a bound with its comparison sign."""
    sign = ">" if part.comparison == "more than" else "≤" if part.bound else "="
    return f"{sign} {_limit(part)}"


def _limit(part: Measurement) -> str:
    return "0" if part.bound == 0 else f"{part.bound:.0e}"


def summary(laws: Laws) -> str:
    """Return the result in one sentence."""
    broken = [name for name, law in laws.items() if not law.ok]
    if not broken:
        return f"All {len(laws)} laws of {laws.of} hold."
    verb = "is" if len(broken) == 1 else "are"
    return f"{len(broken)} of {len(laws)} laws of {laws.of} {verb} broken: {', '.join(broken)}."


def table(laws: Laws) -> Table:
    """Build a table with one row for each law."""
    rows = Table("law", "measured", "bound", "", "what was measured", box=None, padding=(0, 2, 0, 0))
    for name, law in laws.items():
        absent = law.ok and law.worst.path == "n/a"
        mark = Text("-", "yellow") if absent else Text("✓", "green") if law.ok else Text("✗", "red")
        measured, limit = ("n/a", "") if absent else (number(law.measured), bound(law.worst))
        rows.add_row(Text(name), measured, limit, mark, Text(law.worst.what))
    return rows


def findings(laws: Laws) -> list[str]:
    """List the findings of broken laws, the known bugs behind them, and the notes."""
    lines, explained = [], dict[str | None, list[str]]()
    for name, law in laws.items():
        if not law.ok:
            lines += ["", f"{name}: {_finding(law)}"]
            if law.diagnosed:
                explained.setdefault(law.pattern and law.pattern.name, []).append(name)
    for names in explained.values():
        pattern, path = laws[names[0]].pattern, laws[names[0]].broken[0].path
        unexplained = "the policy raised an exception" if path == "raised" else UNEXPLAINED
        lines += ["", f"pattern ({', '.join(names)}): {pattern.name if pattern else unexplained}"]
        lines += [f"  write: {pattern.write}"] if pattern else []
    return lines + [line for note in laws.notes for line in ("", f"note: {note}")]


def _finding(law: Law) -> str:
    """Return location and size of a law's first broken measurement on one line."""
    first, *rest = law.broken
    finding = ": ".join(filter(None, (first.what, *split_finding(first))))
    return f"{finding} ({len(rest)} more like it)" if rest else finding


def print_laws(screen: Console, laws: Laws) -> None:
    """Print the table and the findings."""
    screen.print(table(laws))
    for line in findings(laws):
        screen.print(line, markup=False)


def as_text(laws: Laws) -> str:
    """Return the table and the findings as plain text."""
    buffer = StringIO()
    screen = Console(file=buffer, width=110, highlight=False, soft_wrap=True, emoji=False, color_system=None)
    print_laws(screen, laws)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
