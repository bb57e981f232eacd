"""Gradients, bytes and graph nodes of a policy."""

import pytest
import torch
from gymnasium import spaces

from helpers import foreign_policies as foreign
from holdfast.check.adapters import CleanRL, RawModule
from holdfast.check.context import prepare
from holdfast.check.policy_copy import HORIZON, STEPS
from holdfast.check.probes import (
    GradientReach,
    gradient_between_calls,
    gradient_of_each,
    gradient_within_segments,
)

pytestmark = pytest.mark.usefixtures("annotations_asleep")


def prepared(adapter):
    context = prepare(adapter)
    return context.exact, context.script


def seeded(make, *arguments, **options):
    torch.manual_seed(0)
    return make(*arguments, **options)


def test_between_selects_kinds_and_ignores_a_call_into_itself():
    reach = torch.arange(1.0, 10.0).reshape(3, 3)
    gradients = GradientReach(reach, ["act", "replay", "act"])
    assert gradients.between("act", "act").tolist() == [[0.0, 3.0], [7.0, 0.0]]
    assert gradients.between("replay", "act").tolist() == [[4.0, 6.0]]


def test_gradient_crosses_calls_only_if_the_state_keeps_its_graph():
    for act, crosses in ((step_and_detach, False), (foreign.clear_then_step, True)):
        adapter = seeded(foreign.functions, act=act)
        adapter.rollout_has_grad = True
        reach = gradient_between_calls(*prepared(adapter))
        assert reach.kinds == (["act"] * HORIZON + ["replay"]) * (STEPS // HORIZON)
        assert bool(reach.between("act", "act").any()) is crosses
        assert (reach.reach.diagonal() > 0).all()


def step_and_detach(module, obs, state, first):
    outputs, state = foreign.clear_then_step(module, obs, state, first)
    return outputs, {"h": state["h"].detach()}


def test_gradient_within_segments_stops_at_starts_and_edges():
    policy, script = prepared(CleanRL(seeded(foreign.Agent), obs=4, actions=3))
    gradient = gradient_within_segments(policy, script)
    agent = 2
    starts = script.first[agent, :STEPS].nonzero().flatten().tolist()
    for step in range(STEPS):
        ends = [start for start in [*starts, (step // HORIZON + 1) * HORIZON] if start > step]
        assert (gradient[step, agent] > 0).nonzero().flatten().tolist() == list(range(step, min(ends)))


def test_detached_state_has_no_gradient_through_time():
    policy, script = prepared(CleanRL(seeded(foreign.CutsEveryStep), obs=4, actions=3))
    gradient = gradient_within_segments(policy, script)
    assert (gradient.diagonal(dim1=0, dim2=2) > 0).all()
    assert not gradient.masked_fill(torch.eye(STEPS, dtype=torch.bool)[:, None], 0.0).any()


def test_integer_observations_have_no_gradient():
    adapter = RawModule(seeded(foreign.Names), obs=spaces.Discrete(7))
    assert gradient_within_segments(*prepared(adapter)) is None


def test_gradient_of_each_output():
    options = {"act": foreign.step_by_name, "replay": foreign.replay_by_name}
    right = gradient_of_each(*prepared(seeded(foreign.functions, **options)))
    assert set(right) == {"logits", "value"}
    assert min(right.values()) > 0
    options["replay"] = foreign.replay_without_gradient
    wrong = gradient_of_each(*prepared(seeded(foreign.functions, **options)))
    assert wrong["logits"] == 0.0
    assert wrong["value"] > 0
    assert gradient_of_each(*prepared(RawModule(seeded(foreign.Probabilities), obs=5)))["y"] > 1e-3
