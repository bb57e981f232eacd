"""The traps in docs/museum/index.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
HEADING = "## Traps of a trainer"


def section_of(trap):
    """Return the section of one trap."""
    _, separator, text = (ROOT / "docs" / "museum" / "index.md").read_text().partition(f"\n{HEADING}\n")
    assert separator, "make museum ARGS=traps"
    (section,) = [part for part in text.split("\n### ")[1:] if part.startswith(f"{trap.number}. ")]
    return section


def size_on_the_page(trap):
    """Return the measured size of a trap on the page."""
    return float(re.search(r"- measured: (\S+) ", section_of(trap))[1])
