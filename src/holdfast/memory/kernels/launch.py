"""Starting the kernels: how rows and units are laid over programs, and the buffers they write."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from holdfast.memory.kernels import gru, lstm
from holdfast.shapes import Tensor


@dataclass(frozen=True)
class Plan:
    """How a kernel is laid over the chip."""

    rows: int
    """Rows of one program."""
    units: int
    """Hidden units of one program; fewer than there are: the layer is split over several."""
    warps: int
    chunk: int = 128
    """Inputs that one matrix product of a split layer takes."""
    stages: int = 0
    """How far ahead weights are streamed; 0: each program's part of them stays on the chip."""
    share: int = 1
    """Programs of a split layer that work on one processor at once."""


def lstm_forward(
    x: Tensor, w: Tensor, h: Tensor, c: Tensor, code: Tensor, *, keep: bool, precision: str, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run a segment: `y, h, c`, then what the backward pass needs: states entered, cells, gates."""
    layout = Layout(x, w.shape[1], plan, precision)
    y, entered, gates = layout.outputs(keep, h, code)
    cells = torch.empty_like(y, dtype=torch.float32) if keep else y.new_empty(0, dtype=torch.float32)
    for begin, end in layout.spans():
        before, (h, c) = (h, c), (torch.empty_like(h), torch.empty_like(c))
        for grid, rest in layout.waves(begin, end):
            lstm.forward[grid](
                x, w, *before, code, y, entered, cells, gates, h, c, *rest, KEEP=keep, **layout.settings
            )
    return y, h, c, entered, cells, gates


def lstm_backward(
    w: Tensor, c: Tensor, code: Tensor, cells: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, dc: Tensor | None, *, entry: bool, precision: str, plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Go back over a segment: gradients of all gates `[B,T,4H]`, and if asked of the state at its entry."""
    layout = Layout(gates, w.shape[1], plan, precision)
    dgates, later = torch.empty_like(gates), dh is not None or dc is not None
    dh, dc = _pull(dh, c, later), _pull(dc, c, later)
    for begin, end in layout.spans_back():
        after, (dh, dc) = (dh, dc), (torch.empty_like(dh), torch.empty_like(dc))
        how = {"LATER": later, "ENTRY": entry, **layout.settings}
        for grid, rest in layout.waves(begin, end):
            lstm.backward[grid](w, c, code, cells, gates, dy, *after, dgates, dh, dc, *rest, **how)
        later = True
    return dgates, dh, dc


def gru_forward(
    x: Tensor, w: Tensor, bias: Tensor, h: Tensor, code: Tensor, *, keep: bool, precision: str, plan: Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a segment: `y, h`, then what the backward pass needs: states entered, gates."""
    layout = Layout(x, w.shape[1], plan, precision)
    y, entered, gates = layout.outputs(keep, h, code)
    for begin, end in layout.spans():
        before, h = h, torch.empty_like(h)
        for grid, rest in layout.waves(begin, end):
            gru.forward[grid](
                x, w, bias, before, code, y, entered, gates, h, *rest, KEEP=keep, **layout.settings
            )
    return y, h, entered, gates


def gru_backward(
    w: Tensor, h: Tensor, code: Tensor, entered: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, *, entry: bool, precision: str, plan: Plan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Go back over a segment: gradients `[B,T,4H]` as told in gru.py, and if asked of the entry state."""
    layout = Layout(gates, w.shape[1], plan, precision)
    dgates, later = torch.empty_like(gates), dh is not None
    dh = _pull(dh, h, later)
    for begin, end in layout.spans_back():
        after, dh = dh, torch.empty_like(dh)
        how = {"LATER": later, "ENTRY": entry, **layout.settings}
        for grid, rest in layout.waves(begin, end):
            gru.backward[grid](w, code, entered, gates, dy, after, dgates, dh, *rest, **how)
        later = True
    return dgates, dh


def _pull(gradient: Tensor | None, state: Tensor, later: bool) -> Tensor:
    """What pulls on a last state; where nothing pulls on any, it is not read and may be anything."""
    if gradient is None:
        make = torch.zeros_like if later else torch.empty_like
        return make(state, dtype=torch.float32)
    return gradient.float().contiguous()


class Layout:
    """Which programs run in which launch, over one batch of segments `[B,T,...]`."""

    def __init__(self, x: Tensor, hidden: int, plan: Plan, precision: str) -> None:
        self._like, self._hidden, self._plan = x, hidden, plan
        self.B, self.T = x.shape[:2]
        padded = max(16, 1 << (hidden - 1).bit_length())
        units = min(plan.units, padded)
        self.parts = _ceil(hidden, units)
        chunk = padded if self.parts == 1 else min(plan.chunk, padded)
        # One step hands nothing over; an interpreter runs one program after the other.
        self._joined = self.parts > 1 and self.T > 1 and x.is_cuda
        self.settings: dict[str, Any] = {
            "H": hidden, "CHUNK": chunk, "CHUNKS": _ceil(hidden, chunk),
            "STAGES": plan.stages if self.parts > 1 else 0,
            "ROWS": plan.rows, "UNITS": units, "PARTS": self.parts,
            "TOGETHER": self._joined, "PRECISION": precision, "num_warps": plan.warps, "num_stages": 1,
            "APPROX": x.dtype != torch.float32 and x.is_cuda,
        }  # fmt: skip
        if self._joined:
            # The chip starts all of them at once or refuses: no program waits for one that cannot start.
            self.settings["launch_cooperative_grid"] = True

    def outputs(self, keep: bool, h: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make room for outputs, states entered and gates; split layers hand over states by the second."""
        like = self._like
        size = (self.B, self.T, self._hidden)
        y = like.new_empty(size)
        entered = self.handed_over(like.new_empty(size if keep or self.parts > 1 else 0))
        if self.parts > 1 and not self._joined:
            entered[:, 0] = torch.where(code[:, :1] & 1 != 0, 0.0, h)
        return y, entered, like.new_empty((*size[:2], 4 * self._hidden) if keep else 0)

    def handed_over(self, buffer: Tensor) -> Tensor:
        """Mark a buffer that programs hand over as not written yet: all bits are ones."""
        if self._joined and self._plan.stages == 0:
            buffer.view(torch.int16).fill_(-1)
        return buffer

    def spans(self) -> list[tuple[int, int]]:
        """Cut a segment into what one launch does."""
        if self.parts == 1 or self._joined:
            return [(0, self.T)]
        return [(t, t + 1) for t in range(self.T)]

    def spans_back(self) -> list[tuple[int, int]]:
        """Cut the way back into what one launch does; one more ends it."""
        if self.parts == 1 or self._joined:
            return [(0, self.T)]
        return [*reversed(self.spans()), (0, 0)]

    def waves(self, begin: int, end: int) -> Iterator[tuple[tuple[int], tuple[Any, ...]]]:
        """Say how many programs to start, and for which steps and rows; those that wait must fit at once."""
        like = self._like
        groups = _ceil(self.B, self._plan.rows)
        at_once = (
            max(1, self._plan.share * processors_of(like.device) // self.parts) if self._joined else groups
        )
        for first in range(0, groups, at_once):
            count = min(at_once, groups - first)
            counters = torch.zeros(count, dtype=torch.int32, device=like.device) if self._joined else like
            yield (count * self.parts,), (counters, self.B, self.T, begin, end, first * self._plan.rows)


@cache
def processors_of(device: torch.device) -> int:
    """Count the processors of a chip; a CPU, where kernels are interpreted, is one."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _ceil(size: int, step: int) -> int:
    return -(-size // step)
