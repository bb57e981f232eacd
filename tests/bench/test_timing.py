"""How calls are timed."""

import pytest
import torch

from holdfast.bench import Bench, Case, measure
from holdfast.bench.timing import Times, interleaved, prepare

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def test_a_spread_leaves_one_in_ten_out_at_either_end():
    times = Times([float(number) for number in (5, 1, 2, 3, 4, 10, 9, 8, 7, 6, 0)])
    assert (times.median, times.spread) == (5.0, (1.0, 9.0))
    assert Times([2.0]).spread == (2.0, 2.0)


def test_calls_are_timed_in_turns():
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "abc"}
    found = interleaved(runs, CPU, rounds=2)
    assert "".join(called) == "abc" * 3
    assert {name: len(times.each) for name, times in found.items()} == {"a": 2, "b": 2, "c": 2}


def test_the_first_call_is_timed_on_its_own():
    called = []
    ready = prepare(lambda: called.append(1), CPU, records=True)
    assert (called, ready.how) == ([1], "cpu")
    assert ready.first_seconds >= 0


@needs_gpu
def test_on_a_gpu_what_can_be_is_recorded_and_what_waits_is_not():
    x = torch.ones(4, device="cuda")
    device = torch.device("cuda")
    recorded = prepare(lambda: x + 1, device, records=True)
    assert (recorded.how, recorded.why_eager) == ("graph", "")
    assert recorded.run().tolist() == [2.0] * 4
    waits = prepare(lambda: x.sum().item(), device, records=True)
    assert waits.how == "eager"
    assert waits.why_eager
    assert (x + 1).tolist() == [2.0] * 4, "a failed recording leaves the device usable"
    found = interleaved({"a": recorded.run, "b": waits.run}, device, rounds=3)
    assert all(time > 0 for times in found.values() for time in times.each)


@needs_gpu
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_on_a_gpu_ours_are_recorded_and_right(cell):
    bench = Bench(torch.device("cuda"), ["triton", "dense", "blank steps"], ["float32", "bfloat16"], 3, print)
    outcome = measure(bench, Case(cell, 32, 24, 10, starts=0.2))
    assert outcome.good, outcome
    how = {(each.name, each.precision): each.how for each in outcome.measured}
    assert how["triton", "bfloat16"] == how["dense", "float16"] == "graph"
    assert how["blank steps", "float32"] == "eager"
