import pytest

from check.catalogue import RIGHT, WRONG
from holdfast.check.bench import set_up
from holdfast.check.diagnose import diagnose
from holdfast.check.laws import LAWS, measure

# These tests live many short lives; the checks of shapes run in the tests of the parts they are made of.
pytestmark = pytest.mark.usefixtures("annotations_asleep")


@pytest.mark.parametrize("exhibit", WRONG, ids=lambda exhibit: exhibit.name)
def test_what_is_wrong_is_caught_and_its_pattern_named(exhibit):
    bench = set_up(exhibit.make())
    (law,) = diagnose(bench, list(measure(bench, [exhibit.law])))
    assert not law.ok
    assert (law.pattern and law.pattern.name) == exhibit.pattern, law.finding
    assert ("No known pattern" in law.finding) == (exhibit.pattern is None)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name):
    bench = set_up(RIGHT[name]())
    laws = list(measure(bench))
    assert [law.name for law in laws] == list(LAWS)
    assert {law.name: law.finding for law in laws if not law.ok} == {}
    assert not any("float64" in note for note in bench.notes)


def test_there_is_enough_of_both():
    assert len({exhibit.name for exhibit in WRONG}) == len(WRONG) >= 30
    assert len(RIGHT) >= 15
    assert {exhibit.side for exhibit in WRONG} == {"everywhere", "rollout", "buffer", "update", "evaluation"}
    assert {exhibit.law for exhibit in WRONG} == set(LAWS)
