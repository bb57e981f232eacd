"""The quick measurement of reach gives the arrays of a check."""

import sys

import pytest
import torch

from helpers.broken_policies import LateClear
from helpers.small_policy import OnlySpec, make_small
from holdfast.check.adapters import adapt
from holdfast.check.context import prepare
from holdfast.check.quick_reach import quick_reach
from holdfast.report.check_page import PANELS, leaks


@pytest.mark.parametrize("kind", [None, LateClear])
def test_arrays_are_those_of_a_check(kind):
    policy = make_small(*[kind] * (kind is not None))
    quick, expected = quick_reach(adapt(policy, OnlySpec())), prepare(adapt(policy, OnlySpec())).reach()
    for panel in PANELS:
        assert torch.equal(getattr(quick, panel), getattr(expected, panel))
        assert not bool(leaks(quick, panel).any()) or kind is not None
    assert any(bool(leaks(quick, panel).any()) for panel in PANELS) == (kind is not None)


def test_observations_that_do_not_fit_are_measured_in_parts(monkeypatch):
    adapter = adapt(make_small(), OnlySpec())
    together = quick_reach(adapter)
    monkeypatch.setattr(sys.modules[quick_reach.__module__], "MAX_NUMBERS", 10_000)
    assert torch.equal(quick_reach(adapter).rollout, together.rollout)
