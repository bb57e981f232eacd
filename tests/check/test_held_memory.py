"""Tensors that a policy holds, and copies of policies that hold a graph."""

import pytest
import torch
from torch import nn

from helpers import foreign_policies as foreign
from holdfast.check.held_memory import bytes_held, copy_policy, tensors_held

CACHE = []


class Keeps(foreign.Stepper):
    """Keeps a tensor with its graph on itself."""

    def forward(self, x, state, first):
        y, state = super().forward(x, state, first)
        self.last = y
        return y, state


def test_bytes_and_graph_nodes_are_counted():
    weight = torch.zeros(1000, requires_grad=True)
    holder = nn.Module()
    before = bytes_held(holder)
    holder.total = (weight * 2 + 1).sum()
    after = bytes_held(holder)
    assert after[0] - before[0] == holder.total.untyped_storage().nbytes() == 4
    assert after[1] - before[1] == 4
    holder.view = weight.detach()[10:]
    assert bytes_held(holder)[0] == after[0] + 4000
    del holder.total, holder.view
    assert bytes_held(holder) == before


def test_tensors_of_others_are_not_counted():
    before = bytes_held(nn.GRU(2, 2))
    other = torch.zeros(1000)
    assert bytes_held(nn.GRU(2, 2)) == before
    assert len(other) == 1000


def test_globals_of_its_own_module_are_counted():
    module = Keeps()
    CACHE.append(torch.zeros(7))
    try:
        assert any(leaf is CACHE[0] for leaf in tensors_held(module))
    finally:
        CACHE.clear()


def test_policy_with_a_graph_is_copied_without_it():
    module = Keeps()
    module(torch.randn(2, 5), None, torch.zeros(2, dtype=torch.bool))
    copied = copy_policy(module)
    assert copied.last.equal(module.last)
    assert not copied.last.requires_grad
    assert copied.inwards.weight.requires_grad
    assert copied.inwards.weight is not module.inwards.weight


def test_other_errors_of_copying_are_raised():
    module = nn.GRU(2, 2)
    module.generator = (number for number in range(3))
    with pytest.raises(TypeError, match="generator"):
        copy_policy(module)
