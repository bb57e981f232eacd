"""Write docs/museum.md and docs/catalogue.md: what the check must catch and let pass, measured anew.

make museum               # minutes: everything, with pictures
make museum ARGS=traps    # seconds: the traps of a trainer alone, the last section of the museum
"""

import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch  # noqa: E402

from check.catalogue import RIGHT, WRONG, Exhibit  # noqa: E402
from holdfast.check.bench import set_up  # noqa: E402
from holdfast.check.diagnose import diagnose  # noqa: E402
from holdfast.check.laws import measure, reach_of  # noqa: E402
from holdfast.check.results import Law, Reach  # noqa: E402
from traps.catalogue_of_traps import TRAPS, Trap  # noqa: E402
from traps.page import HEADING  # noqa: E402

DOCS = ROOT / "docs"
UNEXPLAINED = "none: nothing known explains it, and the check says so"


def name_of(exhibit: Exhibit) -> str:
    """Make a file's name of an exhibit's."""
    return re.sub(r"\W+", "-", exhibit.name).strip("-").lower()


def cells(exhibit: Exhibit) -> list[str]:
    """Tell all of an exhibit that is known without measuring."""
    pattern = exhibit.pattern or UNEXPLAINED
    return [exhibit.name, exhibit.story, exhibit.side, exhibit.cell, exhibit.law, pattern]


def catalogue(sizes: dict[str, float], seconds: dict[str, float]) -> str:
    """Write the two tables."""
    lines = [
        "# What the check catches, and what it lets pass",
        "",
        "Written by `make museum` from `tests/check/catalogue.py`; `make test` proves every line: each of "
        f"these {len(WRONG)} breaks the law named and is given the pattern named, and each of the "
        f"{len(RIGHT)} right ones obeys all nine laws.",
        "",
        "## Wrong on purpose",
        "",
        "| name | what is wrong | side | memory | law | pattern | size |",
        "|---|---|---|---|---|---|---:|",
    ]
    lines += [f"| {' | '.join(cells(each))} | {sizes[each.name]:.0e} |" for each in WRONG]
    lines += ["", "## Right", "", "| policy | laws | CPU-seconds |", "|---|---|---:|"]
    lines += [f"| {name} | 9 of 9 hold | {seconds[name]:.1f} |" for name in RIGHT]
    return "\n".join(lines) + "\n"


def museum(laws: dict[str, Law]) -> str:
    """Write of the bugs of memory that were seen in the wild."""
    seen = [each for each in WRONG if each.seen]
    lines = [
        "# The museum of memory bugs",
        "",
        "Every bug here was seen in a public trainer, and runs in our tests: `tests/check/catalogue.py` "
        "holds it, the check must catch it and name its pattern, and `make museum` draws its picture from "
        "the very arrays the laws assert on. A row of a picture is what was seen at one step; colour shows "
        "at which steps it is felt; inside the black line it may be.",
        "",
    ]
    for each in seen:
        law = laws[each.name]
        lines += [f"## {each.name}", "", each.story, "", f"![reach](museum/{name_of(each)}.png)", ""]
        lines += [f"- caught by **{law.name}**: {law.where}"]
        lines += [f"- pattern: {each.pattern or UNEXPLAINED}"]
        lines += [f"- write: {law.pattern.write}"] if law.pattern else []
        lines += [f"- seen in: {each.seen}", ""]
    return "\n".join(lines)


def exhibit_of(trap: Trap, size: str) -> list[str]:
    """Tell all of a trap, and how large it was found."""
    return [
        f"### {trap.number}. {trap.name[0].upper()}{trap.name[1:]}",
        "",
        trap.story,
        "",
        f"- caught by: {trap.caught}",
        f"- measured: {size}, may be {trap.bound:g}: {trap.size}",
        f"- test: `tests/traps/test_traps.py::{trap.test}`",
        f"- seen in: {trap.seen}",
        "",
    ]


def springing(trap: Trap) -> str:
    """Measure with the trap set; without it the measure must hold."""
    right = trap.measure()
    with trap.sprung():
        wrong = trap.measure()
    if not right <= trap.bound < wrong:
        raise SystemExit(f"trap {trap.number}, {trap.name}: {right:g} without it and {wrong:g} with it")
    print(f"trap {trap.number}: {trap.name}: {wrong:.3g}", flush=True)
    return f"{wrong:.3g}"


def trapped() -> str:
    """Write the section of the traps."""
    lines = [
        HEADING,
        "",
        f"{len(TRAPS)} ways to go wrong that the trainer Holdfast follows went, or that its later forms did. "
        "`tests/traps` sets each of them in our own code: the library passes a measurement, and the very "
        "same measurement fails while the trap is set. `make museum ARGS=traps` measures them anew.",
        "",
    ]
    return "\n".join(lines + [line for trap in TRAPS for line in exhibit_of(trap, springing(trap))])


def examine(exhibit: Exhibit) -> tuple[Law, Reach | None]:
    """Measure an exhibit's law, look for the pattern, and gather its reach."""
    bench = set_up(exhibit.make())
    (law,) = diagnose(bench, list(measure(bench, [exhibit.law])))
    found = law.pattern.name if law.pattern else None
    if law.ok or found != exhibit.pattern:
        raise SystemExit(f"{exhibit.name}: expected {exhibit.law} broken by {exhibit.pattern}; found {found}")
    return law, reach_of(bench, [law]) if exhibit.seen else None


def main() -> None:
    """Measure what is asked for, draw, and write."""
    torch.set_num_threads(1)
    traps = trapped()
    page = DOCS / "museum.md"
    if sys.argv[1:] == ["traps"]:
        page.write_text(f"{page.read_text().partition(HEADING)[0].rstrip()}\n\n{traps}")
    elif sys.argv[1:]:
        raise SystemExit(f"{' '.join(sys.argv[1:])}? Say nothing for everything, or traps.")
    else:
        page.write_text(f"{all_laws()}\n{traps}")


def all_laws() -> str:
    """Measure all that is right and wrong, draw, write the catalogue, and return the museum's first part."""
    from holdfast.report.pictures import reach_png

    (DOCS / "museum").mkdir(parents=True, exist_ok=True)
    laws, seconds = {}, {}
    for number, each in enumerate(WRONG, 1):
        laws[each.name], reach = examine(each)
        print(f"{number} of {len(WRONG)}: {each.name}: {laws[each.name].where}", flush=True)
        if reach is not None:
            (DOCS / "museum" / f"{name_of(each)}.png").write_bytes(reach_png(reach, dpi=75))
    for name, make in RIGHT.items():
        begun = time.process_time()
        broken = [law.finding for law in measure(set_up(make())) if not law.ok]
        seconds[name] = time.process_time() - begun
        if broken:
            raise SystemExit(f"{name} is right and was found wrong: {broken}")
        print(f"right: {name}: {seconds[name]:.1f} CPU-s", flush=True)
    sizes = {name: law.worst.measured for name, law in laws.items()}
    (DOCS / "catalogue.md").write_text(catalogue(sizes, seconds))
    return museum(laws)


if __name__ == "__main__":
    main()
