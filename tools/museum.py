"""Write docs/museum/index.md and catalogue.md: broken and correct policies with their measurements.

make museum               # minutes: everything, with pictures
make museum ARGS=traps    # seconds: only the traps of a trainer, the last section of the museum
"""

import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from helpers.exhibits import RIGHT, WRONG, Exhibit  # noqa: E402
from holdfast.check.context import prepare  # noqa: E402
from holdfast.check.diagnose import diagnose  # noqa: E402
from holdfast.check.laws import measure, reach_of  # noqa: E402
from holdfast.check.results import Law, Reach  # noqa: E402
from traps.trap_catalogue import TRAPS, Trap  # noqa: E402
from traps.trap_page import HEADING  # noqa: E402

DOCS = ROOT / "docs" / "museum"


def name_of(exhibit: Exhibit) -> str:
    """Return the file name of an exhibit's plot."""
    return re.sub(r"\W+", "-", exhibit.name).strip("-").lower()


def cells(exhibit: Exhibit) -> list[str]:
    """Return the table cells of an exhibit that need no measurement."""
    return [exhibit.name, exhibit.story, exhibit.side, exhibit.cell, exhibit.law, exhibit.pattern]


def catalogue(sizes: dict[str, float], seconds: dict[str, float]) -> str:
    """Return the page of the two tables."""
    lines = [
        "# What the check catches, and what passes",
        "",
        "Written by `make museum` from `tests/helpers/exhibits.py`; `make test` runs every line: each of "
        f"these {len(WRONG)} breaks the law and gets the pattern given here, and each of the "
        f"{len(RIGHT)} correct ones obeys all laws.",
        "",
        "## Broken on purpose",
        "",
        "| name | what is wrong | side | memory | law | pattern | size |",
        "|---|---|---|---|---|---|---:|",
    ]
    lines += [f"| {' | '.join(cells(exhibit))} | {sizes[exhibit.name]:.0e} |" for exhibit in WRONG]
    lines += ["", "## Correct", "", "| policy | laws | CPU-seconds |", "|---|---|---:|"]
    lines += [f"| {name} | 9 of 9 hold | {seconds[name]:.1f} |" for name in RIGHT]
    return "\n".join(lines) + "\n"


def museum(laws: dict[str, Law]) -> str:
    """Return the page of bugs that were reported in public trainers."""
    lines = [
        "# The museum of memory bugs",
        "",
        "Every bug here was reported in a public trainer, and is part of our tests: "
        "`tests/helpers/exhibits.py` has it, the check must catch it and name its pattern, and `make museum` "
        "plots the arrays that the laws measure. Each row of a plot changes the observation of one step; "
        "colour shows which outputs change; inside the black line they may.",
        "",
    ]
    for exhibit in [exhibit for exhibit in WRONG if exhibit.reported_in]:
        law, plot = laws[exhibit.name], f"![reach]({name_of(exhibit)}.png)"
        lines += [f"## {exhibit.name}", "", exhibit.story, "", plot, ""]
        lines += [f"- caught by **{law.name}**: {law.where}"]
        lines += [f"- pattern: {exhibit.pattern}"]
        lines += [f"- write: {law.pattern.write}"] if law.pattern else []
        lines += [f"- seen in: {exhibit.reported_in}", ""]
    return "\n".join(lines)


def trap_lines(trap: Trap, size: str) -> list[str]:
    """Return the section of a trap, with the measured size."""
    return [
        f"### {trap.number}. {trap.name[0].upper()}{trap.name[1:]}",
        "",
        trap.story,
        "",
        f"- caught by: {trap.caught}",
        f"- measured: {size} (bound {trap.bound:g}): {trap.size}",
        f"- test: `tests/traps/test_traps.py::{trap.test}`",
        f"- seen in: {trap.reported_in}",
        "",
    ]


def measure_trap(trap: Trap) -> str:
    """Measure with the trap; without it the measurement must be within its bound."""
    right = trap.measure()
    with trap.sprung():
        wrong = trap.measure()
    if not right <= trap.bound < wrong:
        raise SystemExit(f"trap {trap.number}, {trap.name}: {right:g} without it and {wrong:g} with it")
    print(f"trap {trap.number}: {trap.name}: {wrong:.3g}", flush=True)
    return f"{wrong:.3g}"


def trap_section() -> str:
    """Return the section of traps."""
    lines = [
        HEADING,
        "",
        f"{len(TRAPS)} bugs found in Metta AI's trainer ([feature coverage](../dev/coverage.md)). "
        "`tests/traps` sets each of them in our own code: the library passes a measurement, and the same "
        "measurement fails with the bug. `make museum ARGS=traps` measures them again.",
        "",
    ]
    return "\n".join(lines + [line for trap in TRAPS for line in trap_lines(trap, measure_trap(trap))])


def examine(exhibit: Exhibit) -> tuple[Law, Reach | None]:
    """Measure and diagnose an exhibit's law, and return its reach."""
    context = prepare(exhibit.make())
    (law,) = diagnose(context, list(measure(context, [exhibit.law])))
    name = law.pattern.name if law.pattern else None
    if law.ok or name != exhibit.pattern:
        raise SystemExit(f"{exhibit.name}: expected {exhibit.law} broken by {exhibit.pattern}; got {name}")
    return law, reach_of(context, [law]) if exhibit.reported_in else None


def main() -> None:
    """Measure, plot and write the pages."""
    torch.set_num_threads(1)
    traps = trap_section()
    page = DOCS / "index.md"
    if sys.argv[1:] == ["traps"]:
        page.write_text(f"{page.read_text().partition(HEADING)[0].rstrip()}\n\n{traps}")
    elif sys.argv[1:]:
        raise SystemExit(f"{' '.join(sys.argv[1:])}? Give no argument, or traps.")
    else:
        page.write_text(f"{all_laws()}\n{traps}")


def all_laws() -> str:
    """Measure all exhibits, write plots and catalogue, and return the museum's first part."""
    from holdfast.report.check_page import reach_png

    DOCS.mkdir(parents=True, exist_ok=True)
    laws, seconds = {}, {}
    for number, exhibit in enumerate(WRONG, 1):
        laws[exhibit.name], reach = examine(exhibit)
        print(f"{number} of {len(WRONG)}: {exhibit.name}: {laws[exhibit.name].where}", flush=True)
        if reach is not None:
            (DOCS / f"{name_of(exhibit)}.png").write_bytes(reach_png(reach, dpi=75))
    for name, make in RIGHT.items():
        started = time.process_time()
        broken = [law.finding for law in measure(prepare(make())) if not law.ok]
        seconds[name] = time.process_time() - started
        if broken:
            raise SystemExit(f"{name} is correct and broke laws: {broken}")
        print(f"correct: {name}: {seconds[name]:.1f} CPU-s", flush=True)
    sizes = {name: law.worst.measured for name, law in laws.items()}
    (DOCS / "catalogue.md").write_text(catalogue(sizes, seconds))
    return museum(laws)


if __name__ == "__main__":
    main()
