"""How long a call takes: CPU-seconds of one thread, or a GPU's own clock around replays of a CUDA graph."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Run = Callable[[], Any]
WARM = 3
LEAST_MS = 2.0
"""What is between two looks at a GPU's clock: shorter calls are repeated."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call, over all rounds."""

    each: Sequence[float]

    @property
    def median(self) -> float:
        """The middle one."""
        return statistics.median(self.each)

    @property
    def spread(self) -> tuple[float, float]:
        """What one in ten is below, and one in ten above."""
        ordered = sorted(self.each)
        tenth = round(0.1 * (len(ordered) - 1))
        return ordered[tenth], ordered[-1 - tenth]


@dataclass(frozen=True)
class Ready:
    """A call that has been warmed up, and how it is timed."""

    run: Run
    how: str
    """`graph`, `eager`, or on a CPU `cpu`."""
    first_seconds: float
    """How long the very first call took on the wall: compiling and tuning, where there is any."""
    why_eager: str = ""


def prepare(run: Run, device: torch.device, *, records: bool) -> Ready:
    """Call it for the first time, warm it up, and record it as a CUDA graph if it can be."""
    begun = time.perf_counter()
    run()
    if device.type != "cuda":
        return Ready(run, "cpu", time.perf_counter() - begun)
    torch.cuda.synchronize()
    first = time.perf_counter() - begun
    _warm(run)
    if not records:
        return Ready(run, "eager", first)
    try:
        _require_no_waiting(run)
        return Ready(_recorded(run), "graph", first)
    except Exception as error:
        torch.cuda.synchronize()
        return Ready(run, "eager", first, why_eager=f"{type(error).__name__}: {error}".splitlines()[0])


def interleaved(runs: Mapping[Any, Run], device: torch.device, rounds: int) -> dict[Any, Times]:
    """Time calls in turns, so that whatever drifts hits all alike."""
    clock = _device_ms if device.type == "cuda" else _cpu_ms
    for run in runs.values():
        run()
    often = {name: _often(run, device) for name, run in runs.items()}
    found: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(clock(run, often[name]))
    return {name: Times(times) for name, times in found.items()}


def _warm(run: Run) -> None:
    """Warm up where recording happens: beside the stream that everything else goes through."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _require_no_waiting(run: Run) -> None:
    """Call it once with every wait of the host an error: a recording that fails may spoil the next."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@dataclass(frozen=True)
class _Recorded:
    """A call as a CUDA graph. It holds the call too: the graph reads from memory that only that keeps."""

    run: Run
    graph: Any
    kept: Any

    def __call__(self) -> Any:
        self.graph.replay()
        return self.kept


def _recorded(run: Run) -> Run:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return _Recorded(run, graph, kept)


def _often(run: Run, device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return max(1, round(LEAST_MS / max(_device_ms(run, 1), 1e-3)))


def _device_ms(run: Run, often: int) -> float:
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is kept busy with one that is not counted, while the host gets ahead of it.
    run()
    begun.record()
    for _ in range(often):
        run()
    ended.record()
    ended.synchronize()
    return begun.elapsed_time(ended) / often


def _cpu_ms(run: Run, often: int) -> float:
    begun = time.process_time()
    for _ in range(often):
        run()
    return 1e3 * (time.process_time() - begun) / often
