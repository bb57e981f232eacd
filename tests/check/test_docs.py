"""The pages on what the check catches say what the tests prove."""

import sys
from pathlib import Path

import pytest

from check.catalogue import RIGHT, WRONG

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from museum import UNEXPLAINED, cells, name_of  # noqa: E402

MUSEUM, _, TRAPS = (ROOT / "docs" / "museum.md").read_text().partition("\n## Traps of a trainer\n")
CATALOGUE = (ROOT / "docs" / "catalogue.md").read_text()
SEEN = [exhibit for exhibit in WRONG if exhibit.seen]


def test_the_catalogue_lists_every_exhibit_as_it_is_tested():
    rows = [line.rpartition(" | ")[0] for line in CATALOGUE.splitlines() if line.count(" | ") == 6]
    assert rows[1:] == [f"| {' | '.join(cells(exhibit))}" for exhibit in WRONG]
    right = [line.split(" | ")[0][2:] for line in CATALOGUE.splitlines() if "9 of 9 hold" in line]
    assert right == list(RIGHT)


@pytest.mark.parametrize("exhibit", SEEN, ids=lambda exhibit: exhibit.name)
def test_the_museum_shows_what_is_tested(exhibit):
    (section,) = [part for part in MUSEUM.split("\n## ") if part.startswith(f"{exhibit.name}\n")]
    assert exhibit.story in section
    assert f"caught by **{exhibit.law}**" in section
    assert f"pattern: {exhibit.pattern or UNEXPLAINED}\n" in section
    assert exhibit.seen in section
    assert (ROOT / "docs" / "museum" / f"{name_of(exhibit)}.png").stat().st_size > 5_000


def test_the_museum_shows_nothing_else():
    assert MUSEUM.count("\n## ") == len(SEEN) >= 15
    assert TRAPS.count("\n## ") == 0
