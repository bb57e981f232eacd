"""Diagnosis of broken laws; `test_known_bugs.py` has one broken policy for every known bug."""

from functools import cache

import pytest
import torch

from helpers import foreign_policies as foreign
from holdfast.check.adapters import CleanRL, RawModule
from holdfast.check.context import prepare
from holdfast.check.diagnose import Diagnosis, diagnose
from holdfast.check.laws import measure
from holdfast.check.results import Law, Measurement

pytestmark = pytest.mark.usefixtures("annotations_asleep")


@cache
def context_of(kind):
    torch.manual_seed(0)
    return prepare(RawModule(kind(), obs=5))


@cache
def agent_context(kind, adapter=CleanRL):
    torch.manual_seed(0)
    return prepare(adapter(kind(), obs=4, actions=3))


def broken_part(path):
    return Measurement("x", 1.0, 0.0, path=path)


def test_laws_that_hold_are_returned_as_they_are():
    laws = [Law("cut", [Measurement("x", 0.0, 0.0)])]
    assert diagnose(context_of(foreign.Stepper), laws) == laws


def test_only_broken_laws_get_a_pattern():
    context = context_of(foreign.IgnoresState)
    carry, pure = diagnose(context, list(measure(context, ["carry", "pure"])))
    assert (carry.ok, carry.pattern.name) == (False, "every call starts from zeros")
    assert (pure.ok, pure.pattern) == (True, None)


def test_bug_of_updates_only_is_named_as_such():
    diagnosis = Diagnosis(agent_context(foreign.FlagsLateInUpdates))
    assert (diagnosis.rollout_bug, diagnosis.replay_bug) == (None, "state reset one step late")
    pattern = diagnosis.explain(Law("replay", [broken_part("replay")]))
    assert pattern.name.startswith("state reset one step late")
    assert "in updates" in pattern.name
    everywhere = Diagnosis(context_of(foreign.ClearsAfterReading))
    pattern = everywhere.explain(Law("clear", [broken_part("rollout")]))
    assert pattern.name == "state reset one step late"


def test_wrong_entry_state_is_a_bug_of_updates():
    diagnosis = Diagnosis(agent_context(foreign.Agent, foreign.StartsFromZeros))
    assert diagnosis.rollout_bug is None
    assert diagnosis.replay_bug == "replay starts from zeros"


def test_right_policy_has_no_bug():
    diagnosis = Diagnosis(context_of(foreign.Stepper))
    assert (diagnosis.rollout_bug, diagnosis.replay_bug, diagnosis.evaluation_bug) == (None, None, None)
    assert (diagnosis.side_effect, diagnosis.random, diagnosis.hidden) == (None, False, False)
    assert diagnosis.explain(Law("clear", [broken_part("rollout")])) is None
    assert diagnosis.explain(Law("clear", [broken_part("raised")])) is None


def test_random_numbers_explain_every_law():
    diagnosis = Diagnosis(context_of(foreign.OwnRandomGenerator))
    assert diagnosis.explain(Law("agree", [broken_part("raised")])).name == "random numbers in the forward pass"


def test_growing_bytes_are_explained_by_a_growing_graph():
    law = Law("bounded", [broken_part("bytes")])
    assert Diagnosis(context_of(foreign.Stepper)).explain(law).name == "memory use grows with time"
    assert Diagnosis(context_of(foreign.Stepper), graph_grew=True).explain(law) is None


def test_policy_that_raises_in_the_diagnosis_has_no_pattern(monkeypatch):
    diagnosis = Diagnosis(context_of(foreign.OneStartClearsAllRows))
    monkeypatch.setattr(foreign.Stepper, "forward", None)
    assert diagnosis.explain(Law("clear", [broken_part("rollout")])) is None


def test_prediction_must_be_better_than_the_right_outputs():
    context = context_of(foreign.Stepper)
    diagnosis, policy = Diagnosis(context), context.exact
    right = torch.zeros(2, 3, dtype=torch.float64)
    measured = right + 1e-9
    assert diagnosis.same(policy, measured, right)
    assert diagnosis.explains(policy, right, measured, right)
    assert not diagnosis.explains(policy, measured + 5e-10, measured, right)
    assert diagnosis.explains(policy, measured + 1e-11, measured, right)
    assert not diagnosis.explains(policy, measured + 1e-6, measured, right + 1)
