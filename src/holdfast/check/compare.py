"""How numbers are held against bounds, and how the place is named where they are out of them."""

from dataclasses import dataclass

import torch

from holdfast.check.results import Measurement
from holdfast.shapes import Float, Tensor


@dataclass(frozen=True)
class Spread:
    """Bounds on many errors of rounding: on their mean, and on all but the largest thousandth of them."""

    mean: float
    most: float

    def judge(self, error: Float[Tensor, "..."]) -> tuple[str, float, float]:
        """Take whichever is closer to its bound: its name, its size, and that bound."""
        # Whoever is not a number is the largest of all, so that it is not sorted away.
        error = error.flatten().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
        mean, most = float(error.mean()), float(error.kthvalue(max(1, round(0.999 * error.numel()))).values)
        if mean / self.mean >= most / self.most:
            return "on average", mean, self.mean
        return "in one of a thousand", most, self.most


ROUNDED = Spread(mean=2e-3, most=5e-2)
"""What layers that compute in bfloat16 may differ by: 8 bits are kept, so that one rounding is up to 4e-3."""
BOUND: dict[torch.dtype, float | Spread] = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: ROUNDED}
SHORT = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16"}
SPOKEN = ("agent", "step")


def most(bound: float | Spread) -> float:
    """Say how far off single numbers may be."""
    return bound.most if isinstance(bound, Spread) else bound


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
    bound: float | Spread,
    *,
    columns: list[str] | None = None,
    about: str = "",
) -> Measurement:
    """Demand that two tensors are equal to within `bound * max(1, |x|)`."""
    error = (now - was).abs() / was.abs().max().clamp(min=1)
    if isinstance(bound, Spread):
        which, size, limit = bound.judge(error)
        over = torch.where(error <= limit, 0.0, error)
        found = f"{_place(over, SPOKEN, columns)} is off by {size:.1e} {which}, may be by {limit:.0e}"
        return Measurement(what, size, limit, finding=found, about=about)
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
