"""Rules of the house that a reader could not see being broken."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "holdfast").rglob("*.py"))
FACE = {"policies/wrapper.py", "check/subjects/puffer.py", "check/patterns.py"}
"""The original interface, a thin face of the memory package; another library's; and advice in words."""


def name_of(path):
    return path.relative_to(ROOT / "src" / "holdfast").as_posix()


def outside_memory(pattern):
    return [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SOURCES
        if not name_of(path).startswith("memory/") and name_of(path) not in FACE
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_only_the_memory_package_cuts_gradients():
    assert outside_memory(r"\.detach(_)?\(") == []


def test_only_the_memory_package_knows_h_and_c():
    assert outside_memory(r"""\[["'][hc]["']\]|\blstm_[hc]\b|\b[hc]_0\b""") == []


def test_nothing_loops_over_time_in_the_memory_package_but_the_reference():
    loops = [
        f"{name_of(path)}: {line.strip()}"
        for path in SOURCES
        if name_of(path).startswith("memory/") and path.name != "reference.py"
        for line in path.read_text().splitlines()
        if re.search(r"\b(for|while)\b.*\b(t|step|T)\b.*:$", line)
    ]
    assert loops == []


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_files_are_short_and_say_what_they_are(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    assert text.startswith('"""')


@pytest.mark.parametrize("pattern", [r"except *:", r"\bhasattr\(", r"# *TODO", r"NotImplementedError"])
def test_nothing_fails_silently_or_is_left_for_later(pattern):
    assert [name_of(path) for path in SOURCES if re.search(pattern, path.read_text())] == []


def test_the_readme_ends_in_a_tree_that_names_every_file():
    tree = (ROOT / "README.md").read_text().rpartition("```")[0].rpartition("```")[2]
    missing = [name_of(path) for path in SOURCES if path.name != "__init__.py" and path.name not in tree]
    assert missing == []
