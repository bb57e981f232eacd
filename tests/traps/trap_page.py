"""The traps in docs/museum/index.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HEADING = "## Traps of a trainer"


def section_of(trap):
    """Cut out what the page says of one trap."""
    _, found, told = (ROOT / "docs" / "museum" / "index.md").read_text().partition(f"\n{HEADING}\n")
    assert found, "make museum ARGS=traps"
    (section,) = [part for part in told.split("\n### ")[1:] if part.startswith(f"{trap.number}. ")]
    return section


def size_on_the_page(trap):
    """Read how large the page says that the trap is."""
    return float(re.search(r"- measured: (\S+) ", section_of(trap))[1])
