"""Where the time goes: a watch that also a GPU is timed by, without waiting for it."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARTS = ("world", "forward", "copy", "update")


class Stopwatch:
    """Adds up the seconds spent in named parts.

    On a GPU the host only hands out work, so events are recorded there, and read when asked.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Count the time inside as that of a part."""
        if not self._on_gpu:
            begun = time.perf_counter()
            yield
            self._seconds[part] += time.perf_counter() - begun
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._events.append((part, begin, end))

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and begin anew."""
        if self._events:
            self._events[-1][2].synchronize()
        for part, begin, end in self._events:
            self._seconds[part] += begin.elapsed_time(end) / 1000
        found = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return found


class Clock:
    """Tells how fast each iteration was, from the end of the one before it, and what its time went to."""

    def __init__(self) -> None:
        self._begun = self._before = time.perf_counter()

    @property
    def seconds(self) -> float:
        """How long the run had been going on when its last iteration ended."""
        return self._before - self._begun

    def restore(self, seconds: float) -> None:
        """Count on from so many seconds."""
        self._before = time.perf_counter()
        self._begun = self._before - seconds

    def take(self, stopwatch: Stopwatch, lived: int) -> dict[str, float]:
        """End an iteration in which so many steps were lived; what no part took is `time/other`."""
        seconds = stopwatch.take()
        now = time.perf_counter()
        passed, self._before = now - self._before, now
        parts = {f"time/{part}": seconds.get(part, 0.0) for part in PARTS}
        parts["time/other"] = max(0.0, passed - sum(parts.values()))
        return {"seconds": now - self._begun, "charts/SPS": lived / passed, **parts}
