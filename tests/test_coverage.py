"""docs/coverage.md names nothing that is not there."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from holdfast.config import keys_of

ROOT = Path(__file__).parent.parent
TABLE = [line for line in (ROOT / "docs" / "coverage.md").read_text().splitlines() if line.startswith("| ")]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE[1:]]
KEY = re.compile(r"(trainer|memory|policy|world)\.[a-z_.0-9]+(?<!\.py)")


@cache
def names_in(file):
    """Names that a file defines at its top level, and those of methods behind their class."""
    found = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target) for target in targets}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def missing(told):
    """Say what of a cell's names is not there: files, names in them, keys."""
    found = []
    for word in re.findall(r"`([^`]+)`", told):
        file, _, name = word.partition("::")
        if "/" in file or file.endswith(".py"):
            places = [base / file for base in (ROOT, ROOT / "src" / "holdfast") if (base / file).exists()]
            if not places or (name and name not in names_in(places[0])):
                found.append(word)
        elif KEY.fullmatch(file) and file not in keys_of():
            found.append(word)
    return found


def test_every_feature_has_its_row():
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, 37)]
    assert {len(row) for row in ROWS} == {5}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_what_exists_or_says_not_yet(row):
    _, what, where, test, left = row
    assert missing(what) + missing(where) + missing(test) == []
    tests = re.findall(r"`(tests/[^`]+::test_[^`]+)`", test)
    assert bool(tests) != (test == "not yet")
    assert "::" in where or "`" in where or where == "not yet"
    assert left or tests, "a row without a test says what is not yet there"


@pytest.mark.parametrize(
    "told",
    [
        "`memory/stores.py`",
        "`memory/store.py::LiveStor`",
        "`memory/store.py::LiveStore.writes`",
        "`tests/test_coverage.py::test_nothing`",
        "`tests/test_nothing.py::test_nothing`",
        "`trainer.bptt_horizons`",
    ],
)
def test_what_is_not_there_is_found(told):
    assert missing(told) != []


def test_what_is_there_is_found():
    assert missing("`memory/store.py::LiveStore.write` `report/metrics.py::METRICS` `trainer.check`") == []
    assert missing("`benchmarks/fast.py` `[B,T]` `first` `tests/test_coverage.py::missing`") == []
