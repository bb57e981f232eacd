"""TrainingMonitor: resets, states, gradients and memory usage of a run as metrics; the leak alarm."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import Any
from weakref import ref

import psutil
import torch
from tensordict import TensorDictBase
from torch import nn

from holdfast import ranks
from holdfast.monitor.gradients import norms_by_module, reach_back, reach_metrics
from holdfast.monitor.state_audit import ResetAudit, current_state, state_metrics
from holdfast.policies import LSTMWrapper
from holdfast.rollout import Segments
from holdfast.state_tree import get_field
from holdfast.types import Tensor
from holdfast.worlds.obs import tensors_of

MIB = 1 << 20
MAX_READINGS = 512
"""Beyond this many readings every other one is dropped."""
WARM_UP = 0.05
"""Share of a run after which all one-time allocations are made."""
GROWTH_SHARE, GROWTH_BYTES = 0.02, 32 * MIB
"""Least growth since warm-up, as a share and in bytes. Readings of a flat run scatter by 7 MiB."""
WINDOW = 12
"""Least number of readings that a leak must show in."""
STEADY = 0.7
"""Least ratio of the smallest to the largest rise between the quarters of the window. A leak rises evenly; a
single allocation rises once, and a cache that fills up rises less and less."""
LARGEST_RISE = 0.25
"""Largest share of the window's growth between two readings. A leak adds a little in every iteration; the allocator's
pools grow in a few steps, as when checkpoints are written."""


def is_due(when: str, iteration: int) -> bool:
    """Return whether `when` (`first`, `every:N` or `off`) includes an iteration, counted from 0.

    The first two iterations are always included: state is carried over for the first time in the second.
    """
    if when == "off":
        return False
    return iteration < 2 or (when != "first" and iteration % int(when.partition(":")[2]) == 0)


class TrainingMonitor:
    """Counts resets in every step; measures states and bytes in every iteration, gradients where `interval` is due."""

    def __init__(self, policy: LSTMWrapper, agents: int, interval: str, *, total_steps: int) -> None:
        self._policy, self._interval = policy, interval
        self.resets = ResetAudit(policy, agents)
        self.memory_usage = MemoryUsage(total_steps, next(policy.parameters()).device)
        self._graph: int | None = None
        self._reach: dict[str, int | float] = {}
        self._norms: dict[str, Tensor] = {}

    def before_update(self, segments: Segments, iteration: int) -> "TrainingMonitor | None":
        """Measure the gradient reach if it is due; then also return the hooks of the update."""
        if not is_due(self._interval, iteration):
            return None
        if self._policy.has_memory():
            self._reach |= reach_metrics(ranks.reduce(reach_back(self._policy, segments)))
        return self

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        """Count the bytes that the first micro-batch saves for its backward pass."""
        with counting_graph(self._policy) as graph:
            yield
        self._graph = graph.bytes

    def on_gradients(self, policy: LSTMWrapper) -> None:
        """Measure the gradient norm of each module, before clipping."""
        self._norms = dict(norms_by_module(policy))

    def pop_metrics(self, segments: Segments, global_step: int) -> dict[str, int | float]:
        """Return all metrics since the last call."""
        norms = torch.stack([*self._norms.values()]).tolist() if self._norms else []
        metrics = {
            **self.resets.pop_metrics(),
            **state_metrics(self._policy, self.resets.age),
            **self.memory_usage.pop_metrics(
                buffer=_buffer_bytes(segments),
                state=bytes_of(current_state(self._policy)) if self._policy.has_memory() else 0,
                graph=self._graph,
                global_step=global_step,
            ),
            **self._reach,
            **dict(zip(self._norms, norms, strict=True)),
        }
        self._reach, self._norms = {}, {}
        return metrics

    def state(self) -> dict[str, Any]:
        """Return the reset counts and graph size that are not popped yet."""
        return {"resets": self.resets.state(), "graph": self._graph}

    def restore(self, saved: Any, global_step: int) -> None:
        """Restore what `state` returned; memory growth is measured from this step on, in this process."""
        self.resets.restore(get_field(saved, "resets", dict))
        self._graph = None if saved["graph"] is None else get_field(saved, "graph", int)
        self.memory_usage.started_at = global_step


def bytes_of(*trees: TensorDictBase) -> int:
    """Sum the bytes of trees; storage that several tensors share counts once."""
    return sum(_storages(leaf for tree in trees for leaf in tensors_of(tree)).values())


def _buffer_bytes(segments: Segments) -> int:
    burn_in = () if segments.burn_in is None else (segments.burn_in.steps, segments.burn_in.entry_state)
    return bytes_of(segments.steps, segments.entry_state, segments.tail, *burn_in)


@dataclass
class SavedForBackward:
    """Bytes of the tensors that autograd saved for the backward pass."""

    bytes: int = 0


@contextmanager
def counting_graph(policy: nn.Module) -> Iterator[SavedForBackward]:
    """Count the bytes that autograd saves inside: one forward pass and its loss, without the backward.

    Shared storage counts once; weights, buffers and intermediate results that are freed do not count.
    """
    graph, references = SavedForBackward(), list[ref[Tensor]]()

    def pack(tensor: Tensor) -> Tensor:
        # Without its graph: an output that refers to its graph, saved by that graph, would never be freed.
        # Gradients still flow: autograd keeps the graph of what it unpacks itself.
        saved = tensor.data
        references.append(ref(saved))
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        yield graph
    weights = _storages((*policy.parameters(), *policy.buffers()))
    sizes = _storages(saved for reference in references if (saved := reference()) is not None)
    graph.bytes = sum(size for storage, size in sizes.items() if storage not in weights)


def process_bytes() -> int:
    """Resident memory of this process, with shared libraries."""
    # The unshared part alone moves by 90 MiB when another process loads or leaves the same libraries.
    return psutil.Process().memory_info().rss


class MemoryUsage:
    """Memory readings of a run: metrics with their growth, and one leak alarm."""

    def __init__(self, total_steps: int, device: torch.device) -> None:
        self._total, self._device, self._alarmed = total_steps, device, False
        self.started_at = 0
        """The step this process started at: a resumed run is a new process."""
        names = ("process", "gpu") if device.type == "cuda" else ("process",)
        self._readings = {name: Readings() for name in names}
        self._parts: dict[str, list[int]] = {"buffer": [], "state": [], "graph": []}

    def pop_metrics(self, *, buffer: int, state: int, graph: int | None, global_step: int) -> dict[str, int | float]:
        """Read memory, once per iteration, and return all metrics; `graph` is none if not yet measured."""
        # Of the whole run in a resumed one too: its process makes the same allocations again.
        warm = global_step - self.started_at >= WARM_UP * self._total
        for name, size in (("buffer", buffer), ("state", state), ("graph", graph or 0)):
            # The last before the run was warm, and the latest.
            self._parts[name] = [*(self._parts[name][:1] if warm else ()), size]
        process = self._readings["process"]
        process.add(global_step, process_bytes(), warm=warm)
        metrics: dict[str, int | float] = {
            "memory/buffer_bytes": buffer,
            "memory/state_bytes": state,
            "machine/process_bytes": process.latest,
            "machine/process_peak_bytes": process.peak,
        }
        if graph is not None:
            metrics["memory/graph_bytes"] = graph
        growth = process.growth()
        if growth is not None:
            metrics["machine/growth"] = growth
        if "gpu" in self._readings:
            self._readings["gpu"].add(global_step, torch.cuda.memory_allocated(self._device), warm=warm)
            metrics["machine/gpu_bytes"] = self._readings["gpu"].latest
            metrics["machine/gpu_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return metrics

    def alarm(self) -> str:
        """Return a one-line warning the first time a leak shows, else ""."""
        growing = [name for name, readings in self._readings.items() if readings.grows()]
        if self._alarmed or not growing:
            return ""
        self._alarmed = True
        parts = [name for name, sizes in self._parts.items() if sizes[-1] > (1 + GROWTH_SHARE) * sizes[0]]
        cause = f"{' and '.join(parts)} grew too" if parts else "buffer, states and graph did not grow"
        return (
            f"{growing[0]} memory grows: {self._readings[growing[0]]}; {cause}. Look for a graph that is "
            "kept alive (a loss or an output stored as a tensor: store float(loss)), or a list that grows."
        )


class Readings:
    """Readings of one number over steps, bounded in number."""

    def __init__(self) -> None:
        self.peak = 0
        self._all: list[tuple[int, int]] = []
        self._base: tuple[int, int] | None = None

    @property
    def latest(self) -> int:
        """The last reading."""
        return self._all[-1][1]

    def add(self, step: int, size: int, *, warm: bool) -> None:
        """Add a reading; growth is measured from the first warm one."""
        if len(self._all) == MAX_READINGS:
            self._all = self._all[::2]
        self._all.append((step, size))
        self.peak = max(self.peak, size)
        if warm and self._base is None:
            self._base = (step, size)

    def growth(self) -> float | None:
        """Slope over the recent half of the run, in bytes per million steps; none: read at fewer than three steps."""
        recent = [(step, size) for step, size in self._all if 2 * step >= self._all[-1][0]]
        if len({step for step, _ in recent}) < 3:
            return None
        return 1e6 * linear_regression(*zip(*recent, strict=True)).slope

    def grows(self) -> bool:
        """Whether memory grew since warm-up, and the later half of the readings since then rises evenly."""
        if self._base is None:
            return False
        start, base = self._base
        window = [size for step, size in self._all if 2 * step >= start + self._all[-1][0]]
        if self.latest - base <= max(GROWTH_BYTES, GROWTH_SHARE * base) or len(window) < WINDOW:
            return False
        count = len(window) // 4
        quarters = [fmean(window[at : at + count]) for at in range(0, 4 * count, count)]
        rises = [after - before for before, after in pairwise(quarters)]
        is_gradual = max(after - before for before, after in pairwise(window)) <= LARGEST_RISE * (
            window[-1] - window[0]
        )
        return min(rises) >= STEADY * max(rises) > 0 and is_gradual

    def __str__(self) -> str:
        """Format the first warm and the last reading, and the growth."""
        step, size = self._base or self._all[0]
        now, growth = self._all[-1][0], self.growth()
        pace = "" if growth is None else f", {growth / MIB:,.0f} MiB per million steps"
        return f"{size / MIB:,.0f} MiB at step {step:,}, {self.latest / MIB:,.0f} MiB at step {now:,}{pace}"


def _storages(tensors: Iterable[Tensor]) -> dict[tuple[torch.device, int], int]:
    """Map the storages of tensors to their bytes."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}
