"""A verdict in words: the table of laws, and for a broken one where, how much, why, and what to write."""

from dataclasses import dataclass
from io import StringIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.check import Law, Laws, Measurement

IN_WORDS = {
    "cut": "No gradient crosses a segment's edge; within a segment it flows.",
    "carry": "What was seen before an edge is felt after it, from segment to segment and rollout to rollout.",
    "clear": "Nothing crosses an episode's start, in rollout, update, evaluation and play.",
    "replay": "Replaying a segment gives what was lived: PPO's first ratio is 1.",
    "isolate": "What an agent says depends on its own history only.",
    "pure": "Asking for a value, or replaying, advances nothing.",
    "bounded": "What is held in memory does not grow with time.",
    "restore": "Saved and loaded, it goes on as if it had never stopped.",
    "agree": "However a segment is laid out in calls, it says the same.",
}
_SIZES = (" moves by up to ", " is off by up to ")


@dataclass(frozen=True)
class Finding:
    """What is wrong about a broken law, taken apart."""

    what: str
    """The measurement that is shown for it."""
    where: str
    size: str
    pattern: str | None
    write: str | None
    more: int
    """How many other measurements of this law are out of bounds."""

    def line(self) -> str:
        """Tell where and how much."""
        others = f" ({self.more} more like it)" if self.more else ""
        size = f": {self.size}" if self.size else ""
        return f"{self.what}: {self.where}{size}{others}"


def finding(law: Law) -> Finding:
    """Take the finding of a broken law apart."""
    broken = [part for part in law.parts if not part.ok]
    first, where = broken[0], broken[0].finding
    for size in _SIZES:
        where = where.partition(size)[0]
    return Finding(
        what=first.what,
        where=where,
        size="" if first.about == "raised" else f"{number(first.measured)}, {must_be(first)}",
        pattern=law.pattern and law.pattern.name,
        write=law.pattern and law.pattern.write,
        more=len(broken) - 1,
    )


def number(value: float) -> str:
    """Write a measured number so that an exact zero looks like one, and so does what was counted."""
    return f"{value:.0f}" if value.is_integer() and abs(value) < 1e5 else f"{value:.1e}"


def bound(part: Measurement) -> str:
    """Write a bound with its sign."""
    edge = "0" if part.bound == 0 else f"{part.bound:.0e}"
    return f"{'>' if part.sense == 'more than' else '≤'} {edge}"


def must_be(part: Measurement) -> str:
    """Say what a number had to be."""
    if part.sense == "at most" and part.bound == 0:
        return "must be 0"
    edge = "0" if part.bound == 0 else f"{part.bound:.0e}"
    return f"must be {part.sense} {edge}"


def summary(laws: Laws) -> str:
    """Say in one sentence whether what was checked is right."""
    broken = [name for name, law in laws.items() if not law.ok]
    if not broken:
        return f"All {len(laws)} laws of {laws.of} hold."
    verb = "is" if len(broken) == 1 else "are"
    return f"{len(broken)} of {len(laws)} laws of {laws.of} {verb} broken: {', '.join(broken)}."


def table(laws: Laws) -> Table:
    """Lay the laws out, a line each."""
    rows = Table("law", "measured", "bound", "", "what was measured", box=None, padding=(0, 2, 0, 0))
    for name, law in laws.items():
        mark = Text("✓", "green") if law.ok else Text("✗", "red")
        absent = law.worst.about == "n/a"
        found, edge = ("n/a", "") if absent else (number(law.measured), bound(law.worst))
        told = (Text(name), found, edge, mark, Text(law.worst.what))
        rows.add_row(*told)
    return rows


def findings(laws: Laws) -> list[str]:
    """Tell every broken law under its name, then what explains them, and what could not be measured."""
    told, explained = [], dict[str | None, list[str]]()
    for name, law in laws.items():
        if not law.ok:
            found = finding(law)
            told += ["", f"{name}: {found.line()}"]
            if law.sought:
                explained.setdefault(found.pattern, []).append(name)
    for names in explained.values():
        told += ["", *explanation(laws[names[0]], names)]
    return told + [line for note in laws.notes for line in ("", f"note: {note}")]


def explanation(law: Law, names: list[str]) -> list[str]:
    """Tell what explains some laws, and what to write."""
    broken = next(part for part in law.parts if not part.ok)
    if law.pattern is None:
        why = "it raised" if broken.about == "raised" else "none we know explains these numbers"
        return [f"pattern ({', '.join(names)}): {why}"]
    return [f"pattern ({', '.join(names)}): {law.pattern.name}", f"  write: {law.pattern.write}"]


def show(screen: Console, laws: Laws) -> None:
    """Print the whole verdict."""
    screen.print(table(laws))
    for line in findings(laws):
        screen.print(line, markup=False)


def as_text(laws: Laws, width: int = 110) -> str:
    """Write the whole verdict as plain text."""
    paper = StringIO()
    show(
        Console(file=paper, width=width, highlight=False, soft_wrap=True, emoji=False, color_system=None),
        laws,
    )
    return "\n".join(line.rstrip() for line in paper.getvalue().splitlines())
