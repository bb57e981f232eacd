"""How much of a state is near its bounds, where it has any."""

from collections.abc import Iterator

import torch
from tensordict import TensorDict

from holdfast.memory.bundle import Bundle
from holdfast.memory.cell import Cell
from holdfast.shapes import Float, Tensor

NEAR = 0.97
"""Beyond this a unit hardly says more, and hardly any gradient comes through it: 1 - 0.97^2 is 0.06."""


def saturation(cell: Cell, state: TensorDict) -> Float[Tensor, ""] | None:
    """Say which share of the units is near a bound; none: no part of this memory has bounds."""
    units = [unit.flatten() for unit in _squashed(cell, state)]
    return (torch.cat(units).abs() > NEAR).double().mean() if units else None


def _squashed(cell: Cell, state: TensorDict) -> Iterator[Tensor]:
    if isinstance(cell, Bundle):
        states = cell.split(state)
        for name, part in cell.cells.items():
            yield from _squashed(part, states[name])
        return
    squash = type(cell).squash
    if squash is not None:
        yield squash(state)
