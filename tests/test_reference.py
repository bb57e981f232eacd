"""docs/reference is what tools/reference.py generates."""

import sys
from pathlib import Path

import pytest

from holdfast.config.run import all_keys
from holdfast.report.metrics import METRICS

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
from reference import FOLDER, PAGES, configuration, metrics  # noqa: E402


@pytest.mark.parametrize("file", PAGES)
def test_generated_page_is_up_to_date(file):
    assert (FOLDER / file).read_text(encoding="utf-8") == PAGES[file](), "type: make docs"


def table_rows(page):
    return [line.split(" | ") for line in page.replace("\\|", "¦").splitlines() if line.startswith(("| `", "| ("))]


def test_metrics_page_has_a_row_for_every_metric_with_unit_meaning_and_range():
    rows = table_rows(metrics())
    assert [row[0].strip("| `") for row in rows] == list(METRICS)
    for row, metric in zip(rows, METRICS.values(), strict=True):
        expected = [metric.unit, metric.meaning, metric.healthy, metric.kind]
        assert [cell.rstrip(" |") for cell in row[1:]] == [cell.replace("|", "¦") for cell in expected]


def test_configuration_page_has_a_row_for_every_key():
    listed = {row[0].strip("| `") for row in table_rows(configuration())}
    for world in ("recall", "arena", "gym:ID", "envpool:ID", "mettagrid:tmaze"):
        assert set(all_keys(world)) - {"world.name"} <= listed
