"""docs/dev/coverage.md names only files, symbols, config keys and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from holdfast.config.run import all_keys

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "dev" / "coverage.md"
TABLE = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE[1:]]
KEY = re.compile(r"(trainer|memory|policy|world)\.[a-z_.0-9]+(?<!\.py)")


@cache
def names_in(file):
    """List the names a file defines at its top level, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {ast.unparse(target) for target in targets}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def missing(cell):
    """List the files, symbols and keys of a table cell that do not exist."""
    absent = []
    for word in re.findall(r"`([^`]+)`", cell):
        file, _, name = word.partition("::")
        if "/" in file or file.endswith(".py"):
            paths = [base / file for base in (ROOT, ROOT / "src" / "holdfast") if (base / file).exists()]
            if not paths or (name and name not in names_in(paths[0])):
                absent.append(word)
        elif KEY.fullmatch(file) and file not in all_keys():
            absent.append(word)
    return absent


def test_every_feature_has_a_row():
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, 37)]
    assert {len(row) for row in ROWS} == {5}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row_names_existing_code_and_tests_or_says_not_yet(row):
    _, feature, where, test, not_yet = row
    assert missing(feature) + missing(where) + missing(test) == []
    tests = re.findall(r"`(tests/[^`]+::test_[^`]+)`", test)
    assert bool(tests) != (test == "not yet")
    assert "::" in where or "`" in where or where == "not yet"
    assert not_yet or tests, "a row without a test names what is missing"


@pytest.mark.parametrize(
    "cell",
    [
        "`memory/stores.py`",
        "`memory/state_store.py::StateStor`",
        "`memory/state_store.py::StateStore.writes`",
        "`tests/test_coverage.py::test_nothing`",
        "`tests/test_nothing.py::test_nothing`",
        "`trainer.bptt_horizons`",
    ],
)
def test_missing_names_are_reported(cell):
    assert missing(cell) != []


def test_existing_names_are_not_reported():
    cell = "`memory/state_store.py::StateStore.write` `report/metrics.py::METRICS` `trainer.check`"
    assert missing(cell) == []
    assert missing("`benchmarks/fast.py` `[B,T]` `first` `tests/test_coverage.py::missing`") == []
