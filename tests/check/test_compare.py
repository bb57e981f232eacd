"""Comparisons with bounds, and rows of state trees."""

from typing import NamedTuple

import pytest
import torch

from holdfast.check.compare import (
    RowAxes,
    clone_state,
    expect_close,
    expect_nonzero,
    expect_zero,
    named_leaves,
    with_leaves,
)
from holdfast.errors import ContractError
from holdfast.monitor.replay_check import BF16_BOUND


class Pair(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def test_rounding_bound_ignores_one_in_a_thousand_but_not_nan():
    zeros = torch.zeros(10, 200)
    few, many, nan = zeros.clone(), zeros.clone(), zeros.clone()
    few[0, 0], many[0, :9] = 0.5, 0.5
    nan[3, :5] = torch.nan
    assert expect_close("x", few, zeros, BF16_BOUND).ok
    assert not expect_close("x", many, zeros, BF16_BOUND).ok
    assert not expect_close("x", nan, zeros, BF16_BOUND).ok
    assert "agent 0, step 0 is off by" in expect_close("x", many, zeros, BF16_BOUND).finding


def test_expect_zero_names_the_first_nonzero_entry():
    diff = torch.zeros(3, 4, 2)
    assert expect_zero("x", diff).ok
    diff[1, 2, 1], diff[2, 0, 0] = -0.5, 0.25
    part = expect_zero("x", diff, "agent", "step", columns=["values", "logits"])
    assert (part.ok, part.measured) == (False, 0.5)
    assert part.finding == "agent 1, step 2, logits changes by up to 5.0e-01, must be 0"
    assert not expect_zero("x", torch.tensor([torch.nan])).ok
    empty = expect_zero("x", torch.zeros(0, 4))
    assert (empty.ok, empty.finding) == (True, "nothing changes by up to 0.0e+00, must be 0")


def test_expect_close_is_relative_to_large_values_only():
    large = torch.tensor([[100.0, 1.0]])
    assert expect_close("x", large + 0.5, large, 0.01).measured == pytest.approx(0.005)
    small = large / 1000
    assert expect_close("x", small + 0.5, small, 0.01).measured == pytest.approx(0.5)
    assert not expect_close("x", large + torch.tensor([0.0, torch.nan]), large, 0.01).ok


def test_expect_close_names_the_first_entry_over_the_bound():
    actual = torch.tensor([[0.001, 0.0], [0.0, 0.5]])
    part = expect_close("x", actual, torch.zeros(2, 2), 0.01)
    assert part.finding == "agent 1, step 1 is off by up to 5.0e-01, allowed 1e-02"
    assert not expect_nonzero("x", 0.0, "no gradient").ok
    assert expect_nonzero("x", 1e-30, "no gradient").ok


def state_of(rows, fill=0.0):
    """An LSTM's pair with rows in axis 1, and a tensor with rows in axis 0, each row with its own number."""
    number = fill + torch.arange(float(rows))
    pair = Pair(number[None, :, None].repeat(2, 1, 4), -number[None, :, None].repeat(2, 1, 4))
    return {"pair": pair, "age": number[:, None].clone()}


AXES = RowAxes.infer(state_of(2), state_of(3))


def test_row_axes_are_inferred_from_two_sizes():
    assert sorted(AXES.axes) == [0, 1, 1]
    with pytest.raises(ContractError, match=r"The initial state is \[4\] for 2 rows and \[4\] for 3"):
        RowAxes.infer(torch.zeros(4), torch.zeros(4))
    with pytest.raises(ContractError, match="exactly one axis must count the rows"):
        RowAxes.infer([torch.zeros(2, 2)], [torch.zeros(3, 3)])


def test_rows_are_picked_masked_and_concatenated():
    state = state_of(4)
    picked = AXES.pick(state, torch.tensor([2, 0]))
    assert isinstance(picked["pair"], Pair)
    assert picked["age"][:, 0].tolist() == picked["pair"].h[1, :, 3].tolist() == [2.0, 0.0]
    mixed = AXES.where(torch.tensor([True, False, False, True]), state_of(4, fill=10.0), state)
    assert mixed["age"][:, 0].tolist() == mixed["pair"].h[0, :, 0].tolist() == [10.0, 1.0, 2.0, 13.0]
    joined = AXES.cat([state, picked])
    assert (-joined["pair"].c[0, :, 0]).tolist() == [0.0, 1.0, 2.0, 3.0, 2.0, 0.0]


def test_cloned_state_shares_neither_memory_nor_graph():
    state = {"h": torch.ones(2, requires_grad=True) * 2, "other": "text"}
    copy = clone_state(state)
    assert not copy["h"].requires_grad
    copy["h"].zero_()
    assert state["h"].tolist() == [2.0, 2.0]
    assert copy["other"] == "text"
    replaced = with_leaves(state, [torch.ones(1)])
    assert (replaced["h"].tolist(), replaced["other"]) == ([1.0], "text")


def test_leaves_are_named_by_their_path():
    assert list(named_leaves(torch.zeros(1))) == ["state"]
    assert list(named_leaves({"a": [torch.zeros(1), 3, torch.zeros(1)]})) == ["['a'][0]", "['a'][2]"]
