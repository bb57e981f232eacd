"""Measurements beside the rollout and its replay: each has a sabotage that it alone catches."""

import pytest
import torch

from helpers import bug_catalogue as bugs
from helpers import policy_styles as styles
from helpers.bug_catalogue import BUGS, RIGHT, Bug
from holdfast.check.adapters import PolicyAdapter, adapt
from holdfast.check.call_laws import (
    bootstrap_values,
    episodes_alone,
    evaluation_as_training,
    exit_states,
    none_as_state,
    overflowing_states,
)
from holdfast.check.context import prepare
from holdfast.check.diagnose import diagnose
from holdfast.check.gradient_laws import segment_gradients
from holdfast.check.laws import LAWS, measure
from holdfast.check.long_laws import late_memory, late_starts, long_segments, many_rows, other_sizes

pytestmark = pytest.mark.usefixtures("annotations_asleep")

BY_NAME = {bug.name: bug for bug in BUGS}
EVALUATES_OTHERWISE = Bug(
    "scaled in evaluation",
    bugs.variant(styles.Memory, heads=lambda self, out, s: self.actor(out) * (1.0 if self.training else 1.1)),
)
HALF_IN_SEGMENTS = Bug(
    "half gradient in segments",
    bugs.variant(
        styles.Segments,
        heads=lambda self, out, s: (self.actor(out) + (0.5 * out - 0.5 * out.detach()).sum(-1, True) * (len(out) > 1),),
    ),
)
ALONE = {
    "bootstrap value": (BY_NAME["bootstrap from zeros"], lambda context: bootstrap_values(context)),
    "exit state": (BY_NAME["exit state swapped"], lambda context: exit_states(context)),
    "none state": (BY_NAME["two initial states"], lambda context: none_as_state(context)),
    "episode alone": (BY_NAME["Python counter"], lambda context: episodes_alone(context)),
    "overflow": (BY_NAME["overflow"], lambda context: overflowing_states(context)),
    "evaluation mode": (EVALUATES_OTHERWISE, lambda context: evaluation_as_training(context)),
    "one agent in evaluation": (BY_NAME["one row in evaluation"], lambda context: evaluation_as_training(context)),
    "late start": (BY_NAME["no clear after 60 steps"], lambda context: late_starts(context.long_run, True)),
    "late memory": (BY_NAME["forgets after 64 steps"], lambda context: late_memory(context.long_run)),
    "long segment": (BY_NAME["chunks of 40 from zeros"], lambda context: long_segments(context.long_run)),
    "many rows": (BY_NAME["no clear of 64 rows"], lambda context: many_rows(context.long_run, True)),
    "inside": (BY_NAME["detach every 12 steps"], lambda context: segment_gradients(context)),
    "chain gradient": (HALF_IN_SEGMENTS, lambda context: segment_gradients(context)),
    "gradient of a parameter": (BY_NAME["half gradient"], lambda context: segment_gradients(context)),
    "no parameter gradient": (BY_NAME["learned start without gradient"], lambda context: segment_gradients(context)),
    "hand-written backward": (BY_NAME["wrong backward"], lambda context: segment_gradients(context)),
}
"""The measurement's path, the sabotage, and the function that measures it."""
TOGETHER = {"chain gradient", "gradient of a parameter", "gradient of a segment", "inside", "hand-written backward"}
"""Gradients are measured in several ways; a wrong one may show in more than one."""
ALSO = {"episode alone": {"none state"}, "many rows": {"late start", "long segment"}}
"""A counter outside the state is not None's either; long episodes run 64 rows."""


def context_of(bug):
    torch.manual_seed(0)
    policy = bug.make()
    return prepare(policy if isinstance(policy, PolicyAdapter) else adapt(policy, **(bug.options or {})))


@pytest.mark.parametrize("path", ALONE)
def test_measurement_catches_its_sabotage(path):
    bug, measured = ALONE[path]
    assert path in {part.path for part in measured(context_of(bug)) if not part.ok}


@pytest.mark.slow
@pytest.mark.parametrize("path", ALONE)
def test_no_other_measurement_catches_it(path):
    bug, _ = ALONE[path]
    broken = {part.path for law in measure(context_of(bug)) for part in law.broken}
    assert broken <= (TOGETHER if path in TOGETHER else {path, *ALSO.get(path, ())})
    assert path in broken


def test_right_policies_pass_every_new_measurement():
    for name in ("optional flags, time first", "CleanRL agent", "window", "right backward", "rounds"):
        make, options = RIGHT[name]
        context = context_of(Bug(name, make, options=options))
        parts = [part for _, measured in ALONE.values() for part in measured(context)] + other_sizes(context)
        assert {part.what: part.finding for part in parts if not part.ok} == {}, name


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for number, name in enumerate(RIGHT) if number % 4 == 0])
def test_right_policy_of_another_interface_obeys_every_law(name):
    make, options = RIGHT[name]
    context = context_of(Bug(name, make, options=options))
    assert {law.name: law.finding for law in measure(context) if not law.ok} == {}


NAMED = {
    "half the units cleared": "clear",
    "soft clear by 0.5": "clear",
    "flags of the neighbour": "clear",
    "cleared to 0.1": "clear",
    "entry in bfloat16": "replay",
}
"""Sabotages whose measure is named too, and a law that each breaks."""
NAMED_ALONE = {
    "every call returns zeros": "replay",
    "a call's first flag ignored": "clear",
    "no clear where many start": "clear",
    "later outputs": "replay",
    "zeros at a call's step 9": "cut",
    "halved every ninth call": "clear",
    "wiped at step 30": "carry",
    "starts at minus infinity": "clear",
}


@pytest.mark.parametrize("name", NAMED | NAMED_ALONE)
def test_sabotage_is_named(name):
    context, bug = context_of(BY_NAME[name]), BY_NAME[name]
    (result,) = diagnose(context, list(measure(context, [(NAMED | NAMED_ALONE)[name]])))
    assert any(word in result.pattern.name for word in bug.words)
    assert result.pattern.fit or name in NAMED_ALONE
    assert "(" not in result.pattern.name


def test_a_maximum_over_time_keeps_most_gradients_out():
    context = context_of(Bug("running maximum", bugs.RunningMaximum))
    assert {law.name: law.finding for law in measure(context, ["cut", "carry", "clear"]) if not law.ok} == {}


def test_catalogue_is_large_and_its_names_are_unique():
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 60
    assert len(RIGHT) >= 40
    assert list(LAWS)


@pytest.mark.parametrize(
    ("forward", "roles"),
    [
        (lambda x, state=None, first=None: 0, "x state first"),
        (lambda obs, done, hidden: 0, "x first state"),
        (lambda carry, inputs, resets: 0, "state x first"),
        (lambda x, hxs, masks: 0, "x state mask"),
        (lambda x, hx, not_done: 0, "x state mask"),
        (lambda x, h, deterministic=False: 0, "x state"),
        (lambda x, h, flags: 0, "x state first"),
        (lambda x, state, *, episode_starts=None: 0, "x state first"),
        (lambda x, lstm_state, terminated, truncated: 0, "x state terminated truncated"),
        (lambda x, init_state, reset_mask: 0, "x state first"),
    ],
)
def test_parameters_of_a_forward_are_recognized(forward, roles):
    from holdfast.check.adapters.call_signature import CallSignature

    assert [parameter.role for parameter in CallSignature.of(forward).parameters] == roles.split()
