"""Copies of a policy in two precisions, its script, and masks computed from it."""

import pytest
import torch
from torch import nn

from helpers import foreign_policies as foreign
from helpers.small_policy import OnlySpec, make_small
from holdfast.check.adapters import RawModule, adapt
from holdfast.check.context import prepare
from holdfast.check.policy_copy import AGENTS, HORIZON, STEPS
from holdfast.check.preflight import Conditions
from holdfast.errors import ContractError

pytestmark = pytest.mark.usefixtures("annotations_asleep")


def make_context(kind=foreign.Stepper):
    torch.manual_seed(0)
    return prepare(RawModule(kind(), obs=5))


def test_copies_have_the_precision_and_kernel_of_the_conditions():
    policy = make_small()
    policy.precision = "bfloat16"
    policy.lstm.cell.kernel = "triton"
    context = prepare(adapt(policy, OnlySpec()), Conditions(kernel="torch"))
    assert list(context.copies) == [torch.float64, torch.bfloat16]
    assert [policy.adapter.module.precision for policy in context.copies.values()] == ["float32", "bfloat16"]
    assert [policy.adapter.module.lstm.cell.kernel for policy in context.copies.values()] == [
        "torch",
        "torch",
    ]
    assert (policy.precision, policy.lstm.cell.kernel) == ("bfloat16", "triton")
    plain = prepare(adapt(policy, OnlySpec()), Conditions(precision="float32", kernel="auto"))
    assert list(plain.copies) == [torch.float64, torch.float32]
    assert [policy.adapter.module.lstm.cell.kernel for policy in plain.copies.values()] == ["torch", "auto"]


def test_script_starts_episodes_at_segment_edges_and_in_all_rows():
    script = make_context().script
    assert (script.agents, script.steps) == (AGENTS, STEPS)
    for agent, step in ((0, HORIZON), (1, 2 * HORIZON - 1), (2, HORIZON + 3), (2, HORIZON + 4)):
        assert script.first[agent, step]
    assert script.first[:, STEPS - 4].all()
    assert (script.terminated | script.truncated)[:, 1:].equal(script.first[:, 1:])
    assert not (script.terminated | script.truncated)[:, 0].any()
    both = script.terminated & script.truncated
    assert all(ends.sum() >= AGENTS for ends in (script.terminated & ~both, script.truncated & ~both, both))


def test_policy_without_first_gets_one_long_episode():
    torch.manual_seed(0)
    context = prepare(RawModule(nn.GRU(5, 16)))
    assert context.script.first.sum() == AGENTS
    assert not context.adapter.sees_first


def test_clears_follow_clear_on():
    context = make_context()
    script, never = context.script, torch.zeros_like(context.script.first)
    expected = {"episode": script.first, "trial": script.first | script.trial, "never": never}
    for context.adapter.clear_on, clears in expected.items():
        assert context.clears.equal(clears)
    assert (script.trial & ~script.first).any()


def test_inputs_and_outputs_are_separated_by_resets_between_them():
    context = make_context()
    clears, valid = context.clears, context.script.valid
    for agent, step, later in ((0, 0, 5), (0, 7, 8), (1, 14, 15), (2, 11, 12), (3, 30, 31), (4, 27, 31)):
        reset = bool(clears[agent, step + 1 : later + 1].any())
        assert bool(context.separated_by_reset[step, agent, later]) is reset
        both_valid = bool(valid[agent, step] & valid[agent, later])
        assert bool(context.must_propagate[step, agent, later]) is (both_valid and not reset)
    earlier = torch.ones(STEPS, STEPS, dtype=torch.bool).tril()
    assert not (context.must_propagate & earlier[:, None]).any()
    last = clears[:, :STEPS].long().cumsum(1).argmax(1)
    assert context.before_last_clear.sum(1).equal(last)


class OnlyFloat32(foreign.Stepper):
    def forward(self, x, state, first):
        return super().forward(x.float(), state, first)


def test_policy_that_fails_in_float64_is_perturbed_in_float32():
    context = make_context(OnlyFloat32)
    assert list(context.copies) == [torch.float32]
    assert context.exact is context.as_trained
    assert context.notes[-1].startswith("not measured in float64, where it does not run: ")
    torch.manual_seed(0)
    assert not context.adapter.module.cell.weight_hh.equal(foreign.Stepper().cell.weight_hh)
    both = make_context()
    assert (both.exact.dtype, both.as_trained.dtype) == (torch.float64, torch.float32)
    torch.manual_seed(0)
    assert both.as_trained.adapter.module.cell.weight_hh.equal(foreign.Stepper().cell.weight_hh)


class NoCopy(foreign.Stepper):
    def __deepcopy__(self, memo):
        raise TypeError("it has\na lock")


def test_policy_that_cannot_be_copied_is_an_error():
    adapter = RawModule(foreign.Stepper(), obs=5)
    adapter.module = NoCopy()
    with pytest.raises(ContractError, match="to the CPU in float32: TypeError: it has a lock"):
        prepare(adapter)
