"""Mutated files of a run and errors of the disk: refused or reported, never silent, never a raw exception.

`PYTHONPATH=tests python tests/helpers/fuzz.py 10000` and `tests/helpers/io_faults.py 1000` print whole tables.
"""

import pytest

from helpers.fuzz import BAD, fuzz, make_gym_run, make_run, table
from helpers.io_faults import inject

pytestmark = pytest.mark.usefixtures("annotations_asleep")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("count", [40, pytest.param(250, marks=pytest.mark.slow)])
def test_mutated_files_are_refused_or_reported(run, tmp_path, count):
    cases = list(fuzz([run, make_gym_run(tmp_path)], count, seed=count))
    bad = [case for case in cases if case[4] in BAD]
    assert not bad, f"{table(cases)}\n{bad[0]}"
    outcomes = {case[4] for case in cases}
    assert {"equal", "refused"} <= outcomes


@pytest.mark.parametrize("count", [20, pytest.param(150, marks=pytest.mark.slow)])
def test_errors_of_the_disk_are_refused_or_reported(run, count):
    cases = list(inject(run, count, seed=count))
    bad = [case for case in cases if case[4] in BAD]
    assert not bad, f"{table(cases)}\n{bad[0]}"
    outcomes = {case[4] for case in cases}
    assert {"equal", "refused", "reported"} <= outcomes
