"""The museum page agrees with the trap catalogue."""

import ast

import pytest

from traps.trap_catalogue import TRAPS
from traps.trap_page import HEADING, ROOT, section_of

CODE = ast.parse((ROOT / "tests" / "traps" / "test_traps.py").read_text()).body
TESTS = {node.name: ast.unparse(node) for node in CODE if isinstance(node, ast.FunctionDef)}


def test_all_eighteen_traps_are_there_in_order():
    assert [trap.number for trap in TRAPS] == list(range(1, 19))
    assert len({trap.name for trap in TRAPS}) == len(TRAPS)


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_every_trap_has_a_test(trap):
    assert f"only_the_trap_fails({trap.number})" in TESTS[trap.test]


def test_every_test_of_a_trap_is_in_the_list():
    assert {name for name in TESTS if name.startswith("test_")} == {trap.test for trap in TRAPS}


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.name)
def test_museum_page_matches_the_trap_catalogue(trap):
    section = section_of(trap)
    title, _, rest = section.partition("\n")
    assert title.lower() == f"{trap.number}. {trap.name.lower()}"
    assert rest.strip().splitlines()[0] == trap.story
    limit, source = f"(bound {trap.bound:g}): {trap.size}", f"seen in: {trap.reported_in}"
    for line in (f"caught by: {trap.caught}", limit, source):
        assert f"{line}\n" in f"{rest}\n"
    assert f"test: `tests/traps/test_traps.py::{trap.test}`\n" in rest


def test_museum_page_has_no_other_traps():
    _, _, section = (ROOT / "docs" / "museum" / "index.md").read_text().partition(f"\n{HEADING}\n")
    assert section.count("\n### ") == len(TRAPS)
    assert section.strip().startswith(f"{len(TRAPS)} bugs")
