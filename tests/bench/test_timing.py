"""How calls are timed."""

import gc
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

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


class Device:
    """A GPU as the host sees it: a diary of what it is told, and a clock."""

    def __init__(self, monkeypatch):
        self.diary, self.now, self.strict, self.recording = [], 0.0, False, False
        self.CUDAGraph = lambda: SimpleNamespace(replay=self.called)
        told = {"Stream": lambda: stream, "current_stream": lambda: stream, "synchronize": lambda: None}
        stream = SimpleNamespace(wait_stream=lambda other: None)
        told |= {"Event": self.event, "CUDAGraph": self.CUDAGraph, "graph": self.graph}
        told |= {"stream": nullcontext, "set_sync_debug_mode": self.set_strict}
        for name, fake in told.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def called(self):
        self.diary.append("replay")
        self.now += 1.0

    def set_strict(self, mode):
        self.strict = mode == "error"

    @contextmanager
    def graph(self, graph):
        self.recording = True
        yield
        self.recording = False

    def event(self, enable_timing):
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: vars(event).update(at=self.now)
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def run(self, waits=False):
        if waits and self.strict:
            raise RuntimeError("called a synchronizing operation\nand more")
        assert not (waits and self.recording), "what waits is never recorded"
        self.diary.append("record" if self.recording else "call")
        self.now += 4.0
        return "kept"


def test_the_host_warms_up_then_records_then_replays(monkeypatch):
    device = Device(monkeypatch)
    ready = prepare(device.run, torch.device("cuda"), records=True)
    assert (ready.how, ready.why_eager, device.strict) == ("graph", "", False)
    assert device.diary == ["call"] * 5 + ["record"]
    assert ready.run() == "kept"
    assert device.diary[-1] == "replay"


def test_a_recorded_call_holds_what_it_reads(monkeypatch):
    device, read = Device(monkeypatch), torch.ones(1)
    ready = prepare(lambda read=read: device.run() and read.sum(), torch.device("cuda"), records=True)
    there = weakref.ref(read)
    del read
    gc.collect()
    assert there() is not None
    del ready
    gc.collect()
    assert there() is None


@pytest.mark.parametrize(
    ("records", "why"), [(True, "RuntimeError: called a synchronizing operation"), (False, "")]
)
def test_what_makes_the_host_wait_is_called_eagerly_and_says_why(monkeypatch, records, why):
    device = Device(monkeypatch)
    ready = prepare(partial(device.run, waits=True), torch.device("cuda"), records=records)
    assert (ready.how, ready.why_eager, device.strict) == ("eager", why, False)
    assert "record" not in device.diary
    assert ready.run() == "kept"


def test_short_calls_are_repeated_between_two_looks_at_the_devices_clock(monkeypatch):
    device = Device(monkeypatch)
    found = interleaved({"short": device.called, "long": device.run}, torch.device("cuda"), rounds=3)
    assert {name: list(times.each) for name, times in found.items()} == {
        "short": [1.0] * 3,
        "long": [4.0] * 3,
    }
    turn = ["replay"] * 3 + ["call"] * 2
    assert device.diary[-15:] == turn * 3
