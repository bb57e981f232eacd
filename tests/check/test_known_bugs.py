"""One broken policy for every known bug, and the outputs predicted for bugs from a policy's own steps."""

from functools import cache
from itertools import combinations

import pytest
import torch

from helpers import foreign_policies as foreign
from helpers.exhibits import RIGHT, WRONG
from holdfast.check import known_bugs
from holdfast.check.adapters import CleanRL, RawModule
from holdfast.check.context import prepare
from holdfast.check.diagnose import diagnose
from holdfast.check.laws import LAWS, measure
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS

# Without jaxtyping checks, which run in the tests of the modules, because these tests make many calls.
pytestmark = pytest.mark.usefixtures("annotations_asleep")
SEGMENTS = STEPS // HORIZON


SLOW_WRONG = (
    "LateClear",
    "ClearsOnTerminatedOnly",
    "NoClearInFloat32",
    "NoClearInTraining",
    "StartsEveryCallFromZeros",
    "An evaluation without flags",
    "TimeAndBatchSwapped",
    "KeepsReplayOutputs",
)
"""Seconds each, and another exhibit has the same pattern."""
SLOW_RIGHT = (
    "fast",
    "hand-written LSTMWrapper",
    "nn.GRU, 3 layers",
    "nn.RNN",
    "nn.GRUCell",
    "CleanRL style, GRU, 2 layers",
    "four rollouts of one segment",
)


def wrong(exhibit):
    marks = [pytest.mark.slow] * (exhibit.name in SLOW_WRONG)
    return pytest.param(exhibit, marks=marks, id=exhibit.name)


@pytest.mark.parametrize("exhibit", [wrong(exhibit) for exhibit in WRONG])
def test_known_bug_breaks_its_law_and_is_diagnosed(exhibit):
    context = prepare(exhibit.make())
    (law,) = diagnose(context, list(measure(context, [exhibit.law])))
    assert not law.ok
    assert (law.pattern and law.pattern.name) == exhibit.pattern, law.finding


def right(name):
    """Holdfast's own policies have the most measurements, of 8 to 18 s; tests/check/test_laws.py checks one."""
    slow = name.startswith("RecurrentPolicy") or name in SLOW_RIGHT
    return pytest.param(name, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("name", [right(name) for name in RIGHT])
def test_correct_policy_obeys_every_law(name):
    context = prepare(RIGHT[name]())
    laws = list(measure(context))
    assert [law.name for law in laws] == list(LAWS)
    assert {law.name: law.finding for law in laws if not law.ok} == {}
    assert not any("float64" in note for note in context.notes)


def test_exhibits_cover_all_laws_and_phases():
    fast = [exhibit for exhibit in WRONG if exhibit.name not in SLOW_WRONG]
    assert len(WRONG) - len(fast) == len(SLOW_WRONG)
    assert {exhibit.pattern for exhibit in fast} == {exhibit.pattern for exhibit in WRONG}
    assert set(SLOW_RIGHT) <= RIGHT.keys()
    assert len({exhibit.name for exhibit in WRONG}) == len(WRONG) >= 30
    assert len(RIGHT) >= 15
    assert {exhibit.side for exhibit in WRONG} == {"everywhere", "rollout", "buffer", "update", "evaluation"}
    assert {exhibit.law for exhibit in WRONG} == set(LAWS) - {"shard"}, "that of shard is in test_shard.py"


@cache
def context_of(kind):
    torch.manual_seed(0)
    return prepare(RawModule(kind(), obs=5))


@cache
def agent_context(kind):
    torch.manual_seed(0)
    return prepare(CleanRL(kind(), obs=4, actions=3))


def rules_of(context):
    return list(known_bugs.reset_rules(context.exact, context.script, context.clears))


def matching_rules(context):
    """The names of the reset rules that predict the rollout."""
    measured = context.outputs[torch.float64].rollout
    predictions = [
        (rule.name, known_bugs.run_from_initial(context.exact, context.script, rule)[0]) for rule in rules_of(context)
    ]
    return [name for name, predicted in predictions if torch.allclose(predicted, measured, atol=1e-9)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (foreign.Stepper, ""),
        (foreign.ClearsAfterReading, "state reset one step late"),
        (foreign.OneStartClearsAllRows, "one episode start resets all rows"),
        (foreign.ClearsByTheFirstRow, "the first row's flags reset all rows"),
    ],
)
def test_reset_rule_predicts_the_rollout_of_its_bug(kind, name):
    names = matching_rules(context_of(kind))
    assert names[:1] == [name]
    assert names == [name] or set(names[1:]) <= {"invalid steps update the state", "trial starts ignored"}


def test_part_of_a_state_is_reset():
    context = agent_context(foreign.CellStateNotCleared)
    assert list(known_bugs.selections(context.exact)) == [("tensor", 0), ("tensor", 1)]
    assert matching_rules(context) == ["only part of the state is reset"]
    deep = agent_context(foreign.SecondLayerNotCleared)
    assert list(known_bugs.selections(deep.exact)) == [("layer", 0), ("layer", 1)]


def test_segment_rules_ignore_flags_of_other_segments():
    context = context_of(foreign.Stepper)
    segment = known_bugs.segment_reset_rules(context.exact, context.script, context.clears)
    rules = {rule.name: rule for rule in segment}
    assert not rules[known_bugs.LATE].clear[:, ::HORIZON].any()
    assert not rules[known_bugs.EARLY].clear[:, HORIZON - 1 :: HORIZON].any()
    names = {rule.name for rule in rules_of(context)} - rules.keys()
    assert names == {known_bugs.AT_EVERY_SEGMENT, known_bugs.BEFORE_ROLLOUT, known_bugs.BEFORE_ROLLOUT_ONLY}


def test_right_entry_states_predict_the_replay_and_zeros_do_not():
    context = context_of(foreign.Stepper)
    policy, script, right = context.exact, context.script, rules_of(context)[0]
    _, states = known_bugs.run_from_initial(policy, script, right)
    entries = dict(known_bugs.entry_rules(policy, states))
    replayed = context.outputs[torch.float64].replay
    predicted = known_bugs.predict_replay(policy, script, entries[""], right)
    assert torch.allclose(predicted, replayed, atol=1e-9)
    zeros = known_bugs.predict_replay(policy, script, entries["replay starts from zeros"], right)
    assert torch.allclose(zeros[:, :HORIZON], replayed[:, :HORIZON], atol=1e-9)
    assert not torch.allclose(zeros[:, HORIZON:], replayed[:, HORIZON:], atol=1e-3)


def test_segments_are_stacked_by_time_then_agent():
    script = context_of(foreign.Stepper).script
    batch = known_bugs.in_segments(script)
    assert batch.batch == (SEGMENTS * AGENTS, HORIZON)
    assert batch.obs[AGENTS + 3].equal(script.obs[3, HORIZON : 2 * HORIZON])


def test_shuffled_entry_states_are_matched_to_their_segments():
    context = context_of(foreign.Stepper)
    policy, script, right = context.exact, context.script, rules_of(context)[0]
    _, states = known_bugs.run_from_initial(policy, script, right)
    _, entry = next(known_bugs.entry_rules(policy, states))
    order = torch.arange(SEGMENTS * AGENTS).roll(3)
    outputs = known_bugs.predict_replay(policy, script, policy.rows.pick(entry, order), right)
    matches = known_bugs.match_entries(policy, script, entry, right, outputs, torch.allclose)
    # A segment that starts an episode fits every entry state, and all initial states are equal.
    rest = ~known_bugs.in_segments(script).first[:, 0]
    assert rest.sum() > SEGMENTS
    assert policy.rows.pick(entry, matches[rest]).equal(policy.rows.pick(entry, order[rest]))
    assert known_bugs.match_entries(policy, script, entry, right, outputs + 1, torch.allclose) is None


def test_swapped_axes_are_predicted():
    context = agent_context(foreign.BatchFirst)
    policy, script = context.exact, context.script
    _, states = policy.steps(script)
    predictions = known_bugs.swapped_axes(policy, script, states, context.clears)
    replayed = context.outputs[torch.float64].replay
    predictions = list(predictions)
    assert sum(torch.allclose(predicted, replayed, atol=1e-9) for predicted in predictions) == 1
    # Each of observations, flags and outputs swapped or not, but for none.
    assert len(predictions) == 7
    assert all(not one.allclose(other) for one, other in combinations(predictions, 2))
