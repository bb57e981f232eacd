import gc
import weakref
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from holdfast.bench.cases import Case
from holdfast.bench.memory import Bench, measure
from holdfast.bench.timing import Times, interleaved, prepare

CPU = torch.device("cpu")


def test_spread_is_the_10th_and_90th_percentile():
    times = Times([float(number) for number in (5, 1, 2, 3, 4, 10, 9, 8, 7, 6, 0)])
    assert (times.median, times.spread) == (5.0, (1.0, 9.0))
    assert Times([2.0]).spread == (2.0, 2.0)


def test_calls_are_timed_in_turns():
    called = []
    runs = {name: lambda name=name: called.append(name) for name in "abc"}
    times_by_name = interleaved(runs, CPU, rounds=2)
    assert "".join(called) == "abc" * 3
    assert {name: len(times.values) for name, times in times_by_name.items()} == {"a": 2, "b": 2, "c": 2}


def test_first_call_is_timed_separately():
    called = []
    ready = prepare(lambda: called.append(1), CPU, records=True)
    assert (called, ready.how) == ([1], "cpu")
    assert ready.first_seconds >= 0


@pytest.mark.gpu
def test_gpu_calls_are_captured_unless_they_synchronize():
    x = torch.ones(4, device="cuda")
    device = torch.device("cuda")
    captured = prepare(lambda: x + 1, device, records=True)
    assert (captured.how, captured.why_eager) == ("graph", "")
    assert captured.run().tolist() == [2.0] * 4
    syncs = prepare(lambda: x.sum().item(), device, records=True)
    assert syncs.how == "eager"
    assert syncs.why_eager
    assert (x + 1).tolist() == [2.0] * 4, "a failed capture leaves the device usable"
    times_by_name = interleaved({"a": captured.run, "b": syncs.run}, device, rounds=3)
    assert all(time > 0 for times in times_by_name.values() for time in times.values)


@pytest.mark.gpu
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_gpu_implementations_are_captured_and_right(cell):
    bench = Bench(torch.device("cuda"), ["triton", "dense", "reset slots"], ["float32", "bfloat16"], 3, print)
    outcome = measure(bench, Case(cell, 32, 24, 10, starts=0.2))
    assert outcome.good, outcome
    how = {(result.name, result.precision): result.how for result in outcome.measured}
    assert how["triton", "bfloat16"] == how["dense", "float16"] == "graph"
    assert how["reset slots", "float32"] == "eager"


class Device:
    """A fake GPU: a log of its calls, and a clock."""

    def __init__(self, monkeypatch):
        self.log, self.now, self.strict, self.capturing = [], 0.0, False, False
        self.CUDAGraph = lambda: SimpleNamespace(replay=self.called)
        fakes = {"Stream": lambda: stream, "current_stream": lambda: stream, "synchronize": lambda: None}
        stream = SimpleNamespace(wait_stream=lambda other: None)
        fakes |= {"Event": self.event, "CUDAGraph": self.CUDAGraph, "graph": self.graph}
        fakes |= {"stream": nullcontext, "set_sync_debug_mode": self.set_strict}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def called(self):
        self.log.append("replay")
        self.now += 1.0

    def set_strict(self, mode):
        self.strict = mode == "error"

    @contextmanager
    def graph(self, graph):
        self.capturing = True
        yield
        self.capturing = False

    def event(self, enable_timing):
        event = SimpleNamespace(at=0.0, synchronize=lambda: None)
        event.record = lambda: vars(event).update(at=self.now)
        event.elapsed_time = lambda other: other.at - event.at
        return event

    def run(self, syncs=False):
        if syncs and self.strict:
            raise RuntimeError("called a synchronizing operation\nand more")
        assert not (syncs and self.capturing), "a call that synchronizes is never captured"
        self.log.append("capture" if self.capturing else "call")
        self.now += 4.0
        return "outputs"


def test_prepare_warms_up_captures_and_replays(monkeypatch):
    device = Device(monkeypatch)
    ready = prepare(device.run, torch.device("cuda"), records=True)
    assert (ready.how, ready.why_eager, device.strict) == ("graph", "", False)
    assert device.log == ["call"] * 5 + ["capture"]
    assert ready.run() == "outputs"
    assert device.log[-1] == "replay"


def test_captured_call_keeps_its_inputs_alive(monkeypatch):
    device, tensor = Device(monkeypatch), torch.ones(1)
    ready = prepare(lambda tensor=tensor: device.run() and tensor.sum(), torch.device("cuda"), records=True)
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    del ready
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(("records", "why"), [(True, "RuntimeError: called a synchronizing operation"), (False, "")])
def test_synchronizing_call_is_timed_eagerly_with_the_reason(monkeypatch, records, why):
    device = Device(monkeypatch)
    ready = prepare(partial(device.run, syncs=True), torch.device("cuda"), records=records)
    assert (ready.how, ready.why_eager, device.strict) == ("eager", why, False)
    assert "capture" not in device.log
    assert ready.run() == "outputs"


def test_short_calls_are_repeated_between_events(monkeypatch):
    device = Device(monkeypatch)
    times_by_name = interleaved({"short": device.called, "long": device.run}, torch.device("cuda"), rounds=3)
    assert {name: list(times.values) for name, times in times_by_name.items()} == {
        "short": [1.0] * 3,
        "long": [4.0] * 3,
    }
    turn = ["replay"] * 3 + ["call"] * 2
    assert device.log[-15:] == turn * 3
