"""Bytes held: buffer, states, graph and process, how fast they grow, and the alarm when they do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import correlation, linear_regression
from weakref import WeakSet

import psutil
import torch
from tensordict import TensorDictBase
from torch import nn

from holdfast.shapes import Tensor
from holdfast.worlds.seen import leaves_of

Place = tuple[torch.device, int]
MIB = 1 << 20
KEPT = 512
"""How many readings are kept at most; beyond it every other one is dropped."""
WARM = 0.05
"""The share of a run after which everything that is made once has been made."""
GROWN, GROWN_BYTES = 0.02, 32 * MIB
"""Growth since then that is no longer noise: both in share and in bytes. Readings scatter by 7 MiB."""
WINDOW = 8
"""Over how many readings, at least, a growth must be seen to go on."""
STEADY = 0.8
"""How much of its pace a growth must keep in the later half of that, or it levels off."""
STRAIGHT = 0.95
"""How well readings must correlate with steps to lie on a line; a single jump never does better than 0.87."""


def bytes_of(*trees: TensorDictBase) -> int:
    """Add up what some trees hold; memory that several tensors look into is counted once."""
    held: dict[Place, int] = {}
    for tree in trees:
        for leaf in leaves_of(tree):
            _hold(held, leaf)
    return sum(held.values())


@dataclass
class Graph:
    """What is kept for a backward."""

    bytes: int = 0


@contextmanager
def counting_graph(policy: nn.Module) -> Iterator[Graph]:
    """Count what is kept for a backward by what is computed inside: one forward and its loss, no backward.

    Memory that is kept several times is counted once; weights and buffers not at all, nor what is computed
    and not needed in the end.
    """
    graph, kept = Graph(), WeakSet[_Kept]()

    def keep(tensor: Tensor) -> _Kept:
        saved = _Kept(tensor)
        kept.add(saved)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(keep, _Kept.get):
        yield graph
    held, known = dict[Place, int](), dict[Place, int]()
    for saved in kept:
        _hold(held, saved.tensor)
    for weight in (*policy.parameters(), *policy.buffers()):
        _hold(known, weight)
    graph.bytes = sum(size for place, size in held.items() if place not in known)


class _Kept:
    """A tensor that the graph keeps; it goes when its part of the graph does."""

    def __init__(self, tensor: Tensor) -> None:
        # The numbers alone: an output that knew its graph, kept by that graph, would keep it alive for ever.
        # No gradient is cut by it: autograd knows where what it unpacks came from.
        self.tensor = tensor.data

    def get(self) -> Tensor:
        return self.tensor


def process_bytes() -> int:
    """Read how much memory this process occupies.

    Resident memory, shared libraries and all: its unshared part alone moves by 90 MiB when another process
    loads or leaves the same libraries, and takes 200 times as long to read.
    """
    return psutil.Process().memory_info().rss


class Held:
    """Keeps the readings of a run, tells them with how fast they grow, and raises the alarm once.

    `readers` says where memory is read, by name: `process`, and `gpu` on one.
    """

    def __init__(
        self,
        total_steps: int,
        device: torch.device | None = None,
        readers: dict[str, Callable[[], int]] | None = None,
    ) -> None:
        self._begun, self._total, self._device = 0, total_steps, device
        self._on_gpu = device is not None and device.type == "cuda"
        self._readers = {"process": process_bytes} if readers is None else readers
        if self._on_gpu and readers is None:
            self._readers["gpu"] = partial(torch.cuda.memory_allocated, device)
        self._seen = {name: Readings() for name in self._readers}
        self._parts: dict[str, list[int]] = {"buffer": [], "state": [], "graph": []}
        self._told = False

    def begin(self, global_step: int) -> None:
        """Count from a step on: before it, another process had the memory."""
        self._begun = global_step

    def take(self, *, buffer: int, state: int, graph: int | None, global_step: int) -> dict[str, int | float]:
        """Read memory once an iteration, and tell it beside what was counted; none: no graph was yet."""
        warm = global_step - self._begun >= WARM * (self._total - self._begun)
        for name, size in (("buffer", buffer), ("state", state), ("graph", graph or 0)):
            # The last before the run was warm, and the latest.
            self._parts[name] = [*(self._parts[name][:1] if warm else ()), size]
        for name, read in self._readers.items():
            self._seen[name].add(global_step, read(), warm=warm)
        process = self._seen["process"]
        found: dict[str, int | float] = {
            "memory/buffer_bytes": buffer,
            "memory/state_bytes": state,
            "machine/process_bytes": process.latest,
            "machine/process_peak_bytes": process.peak,
        }
        if graph is not None:
            found["memory/graph_bytes"] = graph
        growth = process.growth()
        if growth is not None:
            found["machine/growth"] = growth
        if "gpu" in self._seen:
            found["machine/gpu_bytes"] = self._seen["gpu"].latest
            found["machine/gpu_peak_bytes"] = self._seen["gpu"].peak
        if self._on_gpu:
            found["machine/gpu_peak_bytes"] = torch.cuda.max_memory_allocated(self._device)
        return found

    def alarm(self) -> str:
        """Say in one line that memory grows and what to look for, once; otherwise nothing."""
        growing = [name for name, seen in self._seen.items() if seen.grows()]
        if self._told or not growing:
            return ""
        self._told = True
        grown = [name for name, sizes in self._parts.items() if sizes[-1] > (1 + GROWN) * sizes[0]]
        told = f"{' and '.join(grown)} grew too" if grown else "buffer, states and graph did not grow"
        return (
            f"{growing[0]} memory grows: {self._seen[growing[0]]}; {told}. Look for a graph that is kept "
            "alive (a loss or an output that is stored as a tensor: store float(loss)), or a list that grows."
        )


class Readings:
    """Readings of one number over steps, never more than some, so that watching does not grow itself."""

    def __init__(self) -> None:
        self.peak = 0
        self._all: list[tuple[int, int]] = []
        self._base: tuple[int, int] | None = None

    @property
    def latest(self) -> int:
        """The last one."""
        return self._all[-1][1]

    def add(self, step: int, size: int, *, warm: bool) -> None:
        """Add one; the first when the run is warm is what growth is measured from."""
        if len(self._all) == KEPT:
            self._all = self._all[::2]
        self._all.append((step, size))
        self.peak = max(self.peak, size)
        if warm and self._base is None:
            self._base = (step, size)

    def growth(self) -> float | None:
        """Fit a line through the recent half of the run: bytes a million steps; none: too few readings."""
        recent = [(step, size) for step, size in self._all if 2 * step >= self._all[-1][0]]
        if len(recent) < 3:
            return None
        return 1e6 * _slope(recent)

    def grows(self) -> bool:
        """Say whether it has grown since the run was warm, and goes on to.

        It goes on if the later half of the readings since then lies on a rising line that does not level
        off. Something that was made once is a jump and no line, and what scatters is none either.
        """
        if self._base is None:
            return False
        (begun, size), now = self._base, self._all[-1][0]
        window = [(step, size) for step, size in self._all if 2 * step >= begun + now]
        grown = self.latest - size
        if grown <= max(GROWN_BYTES, GROWN * size) or len(window) < WINDOW:
            return False
        early, late = (_slope(part) for part in (window[: len(window) // 2], window[len(window) // 2 :]))
        steps, sizes = zip(*window, strict=True)
        return len(set(sizes)) > 1 and correlation(steps, sizes) >= STRAIGHT and late >= STEADY * early > 0

    def __str__(self) -> str:
        """Tell from where to where."""
        step, size = self._base or self._all[0]
        now, pace = self._all[-1][0], self.growth()
        told = "" if pace is None else f", {pace / MIB:,.0f} MiB a million steps"
        return f"{size / MIB:,.0f} MiB at step {step:,}, {self.latest / MIB:,.0f} MiB at step {now:,}{told}"


def _slope(readings: list[tuple[int, int]]) -> float:
    return linear_regression(*zip(*readings, strict=True)).slope


def _hold(held: dict[Place, int], tensor: Tensor) -> None:
    storage = tensor.untyped_storage()
    held[storage.device, storage.data_ptr()] = storage.nbytes()
