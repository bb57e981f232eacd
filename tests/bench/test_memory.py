"""Measurement of a case: errors, bounds, skipped implementations."""

import sys
from dataclasses import replace

import pytest
import torch

from holdfast.bench import implementations, memory
from holdfast.bench.cases import Case
from holdfast.bench.memory import Bench, measure
from holdfast.bench.report import lines_of
from holdfast.bench.timing import Ready

CPU = torch.device("cpu")
SMALL = Case("lstm", hidden=8, batch=5, steps=9, layers=2, starts=0.3)


def bench_of(*names):
    return Bench(CPU, names, ["float32"], rounds=2, log=lambda line: None)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_case_with_a_start_at_every_step(cell):
    outcome = measure(bench_of("holdfast", "dense", "step by step"), Case(cell, 8, 5, 9, starts=1.0))
    assert outcome.good
    assert all(result.right for result in outcome.measured)


def test_timed_call_is_the_checked_call(monkeypatch):
    def wrong_capture(run, device, *, records):
        outputs = run()
        return Ready(lambda: outputs._replace(y_BTH=1.1 * outputs.y_BTH), "graph", 0.0)

    monkeypatch.setattr(memory, "prepare", wrong_capture)
    outcome = measure(bench_of("holdfast", "dense"), SMALL)
    assert [result.right for result in outcome.measured] == [False, False]
    assert all(0.05 < result.output_error < 0.11 for result in outcome.measured)
    assert not outcome.good


def wrong(change):
    def make(case, inputs, precision):
        right = implementations.ours("auto", case, inputs, precision)
        forward = lambda x: change(right.forward(x), x)  # noqa: E731
        return implementations.Implementation(precision, forward, right.rnn)

    return make


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda y, x: 1.1 * y, "errors 1e-01 1e-01"),
        (lambda y, x: y + float("nan"), "errors nan"),
        (lambda y, x: y + 1e-3 * (x - x.detach()), "errors"),
        (lambda y, x: y.masked_fill(x.abs() > 100, float("nan")), "1e4 NaN"),
    ],
    ids=["wrong", "nan", "wrong gradient", "nan at 1e4"],
)
def test_wrong_implementation_is_marked_and_fails_the_case(monkeypatch, change, text):
    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "holdfast", wrong(change))
    outcome = measure(bench_of("holdfast", "dense"), SMALL)
    (ours, dense) = lines_of(outcome)
    assert text in ours
    assert ours.endswith("✗")
    assert "✗" not in dense
    assert not outcome.good
    assert outcome.as_json()["results"][0]["right"] is False
    assert "nan" not in ours or "errors nan" in text


@pytest.mark.parametrize(("precision", "bound"), [("float32", 1e-5), ("tf32", 1e-2), ("bfloat16", 1e-2)])
def test_error_bounds_depend_on_the_precision(precision, bound):
    one = replace(measure(bench_of("dense"), SMALL).measured[0], precision=precision)
    assert replace(one, output_error=bound, gradient_error=bound).right
    assert not replace(one, output_error=1.01 * bound, gradient_error=0.0).right
    assert not replace(one, output_error=0.0, gradient_error=1.01 * bound).right
    near_dense = replace(one, output_error=0.0, dense_gradient_error=bound)
    assert replace(near_dense, gradient_error=1.5 * bound).right
    assert not replace(near_dense, gradient_error=1.51 * bound).right
    assert not replace(one, at_huge="NaN").right


def test_only_our_implementations_can_fail_a_case(monkeypatch):
    def broken(case, inputs, precision):
        right = implementations.dense(case, inputs, precision)
        return implementations.Implementation(
            precision, lambda x: 2 * right.forward(x), right.rnn, clears=False, time_major=True
        )

    monkeypatch.setitem(implementations.IMPLEMENTATIONS, "dense", broken)
    outcome = measure(bench_of("holdfast", "dense"), SMALL)
    assert [result.right for result in outcome.measured] == [True, False]
    assert outcome.good


@pytest.mark.parametrize(("name", "good"), [("holdfast", False), ("step by step", True)])
def test_failing_implementation_is_skipped_and_ours_fails_the_case(monkeypatch, name, good):
    def fails(case, inputs, precision):
        raise RuntimeError("it broke\nin two lines")

    monkeypatch.setitem(implementations.IMPLEMENTATIONS, name, fails)
    outcome = measure(bench_of(name, "dense"), SMALL)
    assert [result.name for result in outcome.measured] == ["dense"]
    assert outcome.skipped[0].line() == f"{name} float32 is skipped: it broke"
    assert outcome.good is good
    assert outcome.as_json()["skipped"] == [{"implementation": name, "precision": "float32", "why": "it broke"}]


def test_missing_torchrl_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, implementations.TORCHRL, None)
    monkeypatch.setattr(memory, "ON_GPU_ONLY", ())
    outcome = measure(bench_of("torchrl", "dense"), SMALL)
    (skipped,) = outcome.skipped
    message = "torchrl float32 is skipped: it cannot be imported: ModuleNotFoundError"
    assert skipped.line().startswith(message)
    assert outcome.good


def test_gpu_always_measures_dense_in_float16():
    on_gpu = Bench(torch.device("cuda"), ["holdfast", "dense", "torchrl"], ["bfloat16"], 1, print)
    expected = [
        ("holdfast", "bfloat16"),
        ("dense", "bfloat16"),
        ("torchrl", "bfloat16"),
        ("dense", "float16"),
    ]
    assert on_gpu.combinations() == expected
    on_cpu = Bench(CPU, list(implementations.IMPLEMENTATIONS), ["float32"], 1, print)
    assert [name for name, _ in on_cpu.combinations()] == ["holdfast", "dense", "step by step"]
