"""Timing of a call: CPU time of one thread, or CUDA events around replays of a CUDA graph; the name of the machine."""

import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from holdfast.version import __version__

CPU_INFO = Path("/proc/cpuinfo")
TimedCall = Callable[[], Any]
WARMUP = 3
MIN_MS = 2.0
"""Shortest time between two CUDA events; shorter calls are repeated."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call in each round."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """Median over rounds."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """10th and 90th percentile."""
        ordered = sorted(self.values)
        tenth = round(0.1 * (len(ordered) - 1))
        return ordered[tenth], ordered[-1 - tenth]


@dataclass(frozen=True)
class Ready:
    """A warmed-up call and how it is timed."""

    run: TimedCall
    how: str
    """`graph` or `eager`; `cpu` on a CPU."""
    first_seconds: float
    """Wall-clock time of the first call, including compilation and autotuning."""
    why_eager: str = ""


def prepare(run: TimedCall, device: torch.device, *, records: bool) -> Ready:
    """Warm up a call and capture it as a CUDA graph if possible."""
    start = time.perf_counter()
    run()
    if device.type != "cuda":
        return Ready(run, "cpu", time.perf_counter() - start)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    _warm_up(run)
    if not records:
        return Ready(run, "eager", first)
    try:
        _require_no_sync(run)
        return Ready(_capture(run), "graph", first)
    except Exception as error:
        torch.cuda.synchronize()
        return Ready(run, "eager", first, why_eager=f"{type(error).__name__}: {error}".splitlines()[0])


def interleaved(runs: Mapping[Any, TimedCall], device: torch.device, rounds: int) -> dict[Any, Times]:
    """Time calls in turns, so that drift affects all alike."""
    on_gpu = device.type == "cuda"
    for run in runs.values():
        run()
    # A call is repeated until a CUDA event can measure it.
    repeats = {name: max(1, round(MIN_MS / max(_device_ms(run), 1e-3))) for name, run in runs.items() if on_gpu}
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_device_ms(run, repeats[name]) if on_gpu else _cpu_ms(run))
    return {name: Times(values) for name, values in times.items()}


def _warm_up(run: TimedCall) -> None:
    """Warm up on a side stream, as CUDA graph capture requires."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _require_no_sync(run: TimedCall) -> None:
    """Run once with synchronization as an error: a failed capture may corrupt the next one."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


def _capture(run: TimedCall) -> TimedCall:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()

    def replay(owner_of_inputs: TimedCall = run) -> Any:
        """Replay the graph. The call itself is referenced because it owns the memory that the graph reads."""
        graph.replay()
        return outputs

    return replay


def _device_ms(run: TimedCall, repeats: int = 1) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is kept busy with an untimed call while the host gets ahead of it.
    run()
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def _cpu_ms(run: TimedCall) -> float:
    start = time.process_time()
    run()
    return 1e3 * (time.process_time() - start)


def name_of(device: torch.device) -> str:
    """Return the name of the GPU or CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def versions() -> dict[str, str | None]:
    """Return package versions; None: not installed."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "holdfast": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
        **{name: _version(name) for name in ("triton", "tensordict", "torchrl")},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
