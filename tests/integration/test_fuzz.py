"""Mutated files of a run: refused or reported, never silent, never a raw exception, never executed.

`PYTHONPATH=tests python tests/helpers/fuzz.py 10000` prints the whole table.
"""

import pytest

from helpers.fuzz import BAD, fuzz, make_run, table


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("count", [40, pytest.param(600, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("annotations_asleep")
def test_mutated_files_are_refused_or_reported(run, count):
    cases = list(fuzz(run, count, seed=count))
    bad = [case for case in cases if case[4] in BAD]
    assert not bad, f"{table(cases)}\n{bad[0]}"
    outcomes = {case[4] for case in cases}
    assert {"equal", "refused"} <= outcomes
