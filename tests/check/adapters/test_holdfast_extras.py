"""Measurements of Holdfast policies only: live store, compiled parts, kernels."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from helpers import broken_policies
from helpers.small_policy import OnlySpec, Small, make_small
from holdfast.check.adapters import adapt, holdfast_extras
from holdfast.check.adapters.holdfast_extras import GRADIENT_BOUND, _kernels, same_gradients
from holdfast.check.context import prepare
from holdfast.check.laws import measure
from holdfast.check.preflight import Conditions
from holdfast.memory import GRU, LSTM, MinLSTM, kernels

pytestmark = pytest.mark.usefixtures("annotations_asleep")
BF16 = Conditions(precision="bfloat16")


@cache
def context_of(kind):
    return prepare(adapt(make_small(kind), OnlySpec()))


def measure_law(policy, law, conditions=BF16):
    (result,) = measure(prepare(adapt(policy, OnlySpec()), conditions), [law])
    return result


def broken(parts):
    return [part.what for part in parts if not part.ok]


class HalfAGradient(LSTM):
    """A kernel in bfloat16 that loses the gradient of its input weights at every other step."""

    def forward(self, x, state, clear, valid=None):
        y, after = super().forward(x, state, clear, valid)
        if x.dim() == 3 and torch.is_autocast_enabled("cpu"):
            y = torch.cat([y[:, ::2], y[:, 1::2].detach()], 1)[:, _inverse(x.shape[1])]
        return y, after


def _inverse(steps):
    return torch.cat([torch.arange(0, steps, 2), torch.arange(1, steps, 2)]).argsort()


def test_lost_kernel_gradient_is_caught_in_bfloat16():
    right, wrong = (measure_law(make_small(memory=kind(12, 16, 2)), "agree") for kind in (LSTM, HalfAGradient))
    assert right.ok
    assert broken(wrong.parts) == ["its gradients, bf16"]
    assert wrong.measured > 2 * GRADIENT_BOUND[torch.bfloat16]


def test_both_kernels_are_compared_with_the_reference_on_a_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "refused_on", lambda device: None)
    on_cpu = prepare(adapt(make_small(), OnlySpec())).as_trained
    on_gpu = replace(on_cpu, device=torch.device("cuda"))
    assert _kernels(LSTM(4, 48), on_gpu) == _kernels(GRU(4, 512), on_gpu) == ("torch", "triton")
    forced = LSTM(4, 48)
    forced.kernel = "triton"
    for cell, policy in (
        (forced, on_gpu),
        (LSTM(4, 40), on_gpu),
        (MinLSTM(4, 48), on_gpu),
        (LSTM(4, 48), on_cpu),
    ):
        assert _kernels(cell, policy) == ()


@pytest.mark.parametrize("law", list(holdfast_extras.OF_LAW))
def test_right_policy_obeys_the_law(law):
    parts = holdfast_extras.OF_LAW[law](context_of(Small))
    assert parts
    assert broken(parts) == []


@pytest.mark.parametrize(
    ("kind", "law", "what"),
    [
        (broken_policies.GradientThroughTheEncoder, "cut", "gradient across live calls of 1"),
        (broken_policies.EntryWithGraph, "cut", "gradient into a replay's entry state"),
        (
            broken_policies.ClearsOnTerminatedOnly,
            "clear",
            "information across starts given by truncateds, live calls of 1, f64",
        ),
        (broken_policies.SharedSlices, "isolate", "agents in two slices"),
        (broken_policies.BootstrapAdvances, "pure", "live state after bootstrap values and replays"),
        (broken_policies.CellStateNotSaved, "restore", "outputs after set_memory"),
        (broken_policies.WrongKernel, "agree", "cell against its reference, f64"),
        (broken_policies.OtherWhenCompiled, "agree", "outputs compiled against eager, f64"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_broken_policy_breaks_the_measurement(kind, law, what):
    assert what in broken(holdfast_extras.OF_LAW[law](context_of(kind)))


def test_gradient_errors_are_relative_to_each_tensor():
    expected = [torch.tensor([4.0, 1.0]), torch.tensor([1e-12]), None]
    off = [torch.tensor([4.0, 2.0]), torch.tensor([1e-12]), None]
    part = same_gradients("x", off, expected, "cell", torch.float32)
    assert (part.ok, part.measured) == (False, 0.25)
    rounding = [expected[0], torch.tensor([2e-12]), None]
    assert same_gradients("x", rounding, expected, "cell", torch.float32).measured < 1e-3
    assert same_gradients("x", expected, expected, "cell", torch.float32).ok
