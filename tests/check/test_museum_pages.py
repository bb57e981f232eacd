"""docs/museum/index.md and docs/museum/catalogue.md agree with the exhibits that the tests run."""

import sys
from pathlib import Path

import pytest

from helpers.exhibits import RIGHT, WRONG

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from museum import cells, name_of  # noqa: E402

MUSEUM, _, TRAPS = (ROOT / "docs" / "museum" / "index.md").read_text().partition("\n## Traps of a trainer\n")
CATALOGUE = (ROOT / "docs" / "museum" / "catalogue.md").read_text()
REPORTED = [exhibit for exhibit in WRONG if exhibit.reported_in]


def test_catalogue_lists_every_exhibit():
    rows = [line.rpartition(" | ")[0] for line in CATALOGUE.splitlines() if line.count(" | ") == 6]
    assert rows[1:] == [f"| {' | '.join(cells(exhibit))}" for exhibit in WRONG]
    right = [line.split(" | ")[0][2:] for line in CATALOGUE.splitlines() if "9 of 9 hold" in line]
    assert right == list(RIGHT)


@pytest.mark.parametrize("exhibit", REPORTED, ids=lambda exhibit: exhibit.name)
def test_museum_has_a_section_for_each_reported_bug(exhibit):
    (section,) = [part for part in MUSEUM.split("\n## ") if part.startswith(f"{exhibit.name}\n")]
    assert exhibit.story in section
    assert f"caught by **{exhibit.law}**" in section
    assert f"pattern: {exhibit.pattern}\n" in section
    assert exhibit.reported_in in section
    assert (ROOT / "docs" / "museum" / f"{name_of(exhibit)}.png").stat().st_size > 5_000


def test_museum_has_no_other_sections():
    assert MUSEUM.count("\n## ") == len(REPORTED) >= 15
    assert TRAPS.count("\n## ") == 0
