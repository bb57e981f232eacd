"""How numbers are held against bounds, and how the place is named where they are out of them."""

import torch

from holdfast.check.results import Measurement
from holdfast.shapes import Tensor

BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}
SHORT = {torch.float64: "f64", torch.float32: "f32"}
SPOKEN = ("agent", "step")


@torch.no_grad()
def nothing(
    what: str, moved: Tensor, *axes: str, columns: list[str] | None = None, about: str = ""
) -> Measurement:
    """Demand that a tensor is exactly zero; a finding names its first entry that is not, by its axes.

    With `columns`, the last axis is told by their names.
    """
    moved = moved.abs()
    size = float(moved.max()) if moved.numel() else 0.0
    found = f"{_place(moved, axes, columns)} moves by up to {size:.1e}, must be 0"
    return Measurement(what, size, 0.0, finding=found, about=about)


@torch.no_grad()
def close(
    what: str,
    now: Tensor,
    was: Tensor,
    bound: float,
    *,
    columns: list[str] | None = None,
    about: str = "",
) -> Measurement:
    """Demand that two tensors are equal to within `bound * max(1, |x|)`."""
    error = (now - was).abs() / was.abs().max().clamp(min=1)
    size = float(error.max())
    over = torch.where(error <= bound, 0.0, error)
    found = f"{_place(over, SPOKEN, columns)} is off by up to {size:.1e}, may be by {bound:.0e}"
    return Measurement(what, size, bound, finding=found, about=about)


def alive(what: str, size: float, finding: str, about: str = "") -> Measurement:
    """Demand that something moves."""
    return Measurement(what, size, 0.0, "more than", finding, about)


def _place(moved: Tensor, axes: tuple[str, ...], columns: list[str] | None) -> str:
    """Name the first entry that is not zero, or the first of all if none is."""
    if not moved.numel():
        return "nothing"
    where = (moved != 0).nonzero()
    index = where[0].tolist() if len(where) else [0] * moved.dim()
    told = [f"{axis} {at}" for axis, at in zip(axes, index, strict=False)]
    if columns is not None:
        told.append(columns[index[-1]])
    return ", ".join(told)
