"""The page of the metrics is what the dictionary says."""

import sys
from pathlib import Path

from holdfast.report import METRICS

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from metrics import PAGE, page  # noqa: E402


def test_the_page_is_what_the_dictionary_says():
    assert PAGE.read_text(encoding="utf-8") == page(), "type: make docs"


def test_the_page_has_a_row_for_every_number_with_all_that_is_said_of_it():
    rows = [line.split(" | ") for line in page().replace("\\|", "¦").splitlines() if line.startswith("| `")]
    assert [row[0].strip("| `") for row in rows] == list(METRICS)
    for row, metric in zip(rows, METRICS.values(), strict=True):
        said = [metric.unit, metric.meaning, metric.healthy, metric.kind]
        assert [cell.rstrip(" |") for cell in row[1:]] == [cell.replace("|", "¦") for cell in said]
