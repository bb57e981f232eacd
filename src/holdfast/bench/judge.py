"""Whether a rival is right: its outputs and gradients against the float64 reference, and huge inputs."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from holdfast.bench.cases import Numbers, multiplying
from holdfast.bench.rivals import Rival
from holdfast.shapes import Float, Tensor

AT_ONCE = {"cpu": 256, "cuda": 1024}
"""Rows of the reference at once: its graph holds every gate of every step in float64."""


@dataclass(frozen=True)
class Said:
    """What a call gives and what comes back through it."""

    y_BTH: Float[Tensor, "B T H"]
    x_grad_BTH: Float[Tensor, "B T H"]
    weight_grads: tuple[Tensor, ...]


def both_ways(rival: Rival, x: Tensor, asked: Tensor) -> tuple[Tensor, ...]:
    """Run forwards and backwards: output, then gradients of the input and of the weights."""
    with multiplying(rival.precision):
        y = rival.forward(x)
        return y, *torch.autograd.grad(y, [x, *rival.weights], asked)


def as_read(rival: Rival, x_BTH: Float[Tensor, "B T H"]) -> Tensor:
    """Lay numbers out as a rival reads them, outside of what is timed."""
    x = x_BTH.to(rival.kept_in)
    return x.transpose(0, 1).contiguous() if rival.time_major else x.clone()


def answers(rival: Rival, numbers: Numbers, *, huge: bool = False) -> Said:
    """Let a rival answer once."""
    x = as_read(rival, numbers.huge_BTH if huge else numbers.x_BTH).requires_grad_()
    return as_said(rival, both_ways(rival, x, as_read(rival, numbers.asked_BTH)))


def as_said(rival: Rival, told: tuple[Tensor, ...]) -> Said:
    """Lay out what a call gave as the reference lays it out."""
    y, x_grad, *weight_grads = told
    if rival.time_major:
        y, x_grad = y.transpose(0, 1), x_grad.transpose(0, 1)
    return Said(y, x_grad, tuple(weight_grads))


def truth_of(numbers: Numbers, *, clears: bool) -> Said:
    """Run the reference in float64, with clears or as a call that knows of none; some rows at a time."""
    cell = copy.deepcopy(numbers.cell).double()
    clear_BT = numbers.clear_BT if clears else torch.zeros_like(numbers.clear_BT)
    weights, parts = list(cell.rnn.parameters()), []
    for rows in torch.arange(len(clear_BT), device=clear_BT.device).split(AT_ONCE[clear_BT.device.type]):
        x = numbers.x_BTH[rows].double().requires_grad_()
        y = cell.plain(x, numbers.state[rows].double(), clear_BT[rows])[0]
        grads = torch.autograd.grad(y, [x, *weights], numbers.asked_BTH[rows].double())
        with torch.no_grad():
            # A copy without its graph, so that only one part's is ever held.
            parts.append((y.clone(), *grads))
    ys, x_grads, *weight_grads = zip(*parts, strict=True)
    return Said(torch.cat(ys), torch.cat(x_grads), tuple(torch.stack(each).sum(0) for each in weight_grads))


def errors_of(said: Said, truth: Said) -> tuple[float, float]:
    """Say how far outputs and gradients are off, each tensor relative to its largest entry; NaN stays NaN."""
    pairs = zip((said.x_grad_BTH, *said.weight_grads), (truth.x_grad_BTH, *truth.weight_grads), strict=True)
    gradients = torch.stack([_apart(one, other) for one, other in pairs])
    return float(_apart(said.y_BTH, truth.y_BTH)), float(gradients.amax())


def fate_of(said: Said) -> str:
    """Say what became of huge inputs: ok, inf where the format has no such number, or NaN."""
    every: Sequence[Tensor] = (said.y_BTH, said.x_grad_BTH, *said.weight_grads)
    if any(bool(each.isnan().any()) for each in every):
        return "NaN"
    return "inf" if any(bool(each.isinf().any()) for each in every) else "ok"


@torch.no_grad()
def _apart(one: Tensor, other: Tensor) -> Tensor:
    # amax hands a NaN on. Where the truth is 0 throughout, as with nothing but starts, only 0 is right.
    off = (one.double() - other).abs().amax()
    return torch.where(off == 0, off, off / other.abs().amax())


def timed_call(rival: Rival, numbers: Numbers) -> "partial[tuple[Tensor, ...]]":
    """Make the call that is timed: nothing but forwards and backwards over inputs that lie ready."""
    x = as_read(rival, numbers.x_BTH).requires_grad_()
    return partial(both_ways, rival, x, as_read(rival, numbers.asked_BTH))
