"""What is measured: sizes, and one set of numbers that every rival is handed."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from tensordict import TensorDict

from holdfast.memory import make_cell
from holdfast.memory.products import products
from holdfast.memory.stack import Stack
from holdfast.shapes import Bool, Float, Tensor

CELLS = ("lstm", "gru")
Precision = Literal["float32", "tf32", "float16", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "float16", "bfloat16")
HUGE = 1e4
"""How large inputs may be without a NaN."""
Sizes = tuple[tuple[int, tuple[int, ...]], ...]
TARGETS: Sizes = ((128, (256, 1024, 4096)), (256, (256, 1024, 4096)), (512, (256, 1024)))
"""Hidden sizes and rows that are measured on a GPU."""
ON_CPU: Sizes = ((128, (32, 64, 256, 1024)),)
"""Hidden sizes and rows that are measured on a CPU."""


@dataclass(frozen=True)
class Case:
    """One size: rows of `steps` steps through `layers` layers of a cell; a share of all steps are starts."""

    cell: str
    hidden: int
    batch: int
    steps: int = 64
    layers: int = 1
    starts: float = 0.02

    def __str__(self) -> str:
        """Name it in one line."""
        layers = "" if self.layers == 1 else f" L={self.layers}"
        sizes = f"{self.cell} H={self.hidden} B={self.batch} T={self.steps}{layers}"
        return f"{sizes} {100 * self.starts:.3g} % starts"


def cases_of(
    device: torch.device,
    cells: Sequence[str],
    hidden: Sequence[int],
    batch: Sequence[int],
    steps: Sequence[int],
    layers: int,
    starts: Sequence[float],
) -> list[Case]:
    """Put sizes together; where none are given, those of the device."""
    usual = TARGETS if device.type == "cuda" else ON_CPU
    sizes = [(H, B) for H, rows in usual for B in rows]
    if hidden or batch:
        every = sorted({B for _, B in sizes})
        sizes = [(H, B) for H in hidden or [H for H, _ in usual] for B in batch or every]
    return [
        Case(cell, H, B, T, layers, share)
        for cell in cells
        for H, B in sizes
        for T in steps
        for share in starts
    ]


@dataclass(frozen=True)
class Numbers:
    """What every rival of a case is handed: the same numbers, which all precisions can write."""

    cell: Stack
    x_BTH: Float[Tensor, "B T H"]
    huge_BTH: Float[Tensor, "B T H"]
    """Other inputs, up to 1e4."""
    state: TensorDict
    clear_BT: Bool[Tensor, "B T"]
    asked_BTH: Float[Tensor, "B T H"]
    """The gradient that comes back from above."""


def draw(case: Case, device: torch.device, seed: int = 0) -> Numbers:
    """Draw the numbers of a case, where they are needed: float32, rounded to what bfloat16 can write."""
    chance = torch.Generator(device).manual_seed(seed)
    cell = _cell(case, seed).to(device)
    shape = (case.batch, case.steps, case.hidden)
    uniform = partial(torch.rand, generator=chance, device=device)
    normal = partial(torch.randn, generator=chance, device=device)
    size = (case.batch, case.layers, case.hidden)
    entry = {leaf: _rounded(uniform(size) - 0.5) for leaf in cell.leaves}
    return Numbers(
        cell=cell,
        x_BTH=_rounded(normal(shape)),
        huge_BTH=_rounded((2 * uniform(shape) - 1) * HUGE),
        state=TensorDict(entry, batch_size=[case.batch]),
        clear_BT=uniform(shape[:2]) < case.starts,
        asked_BTH=_rounded(normal(shape)),
    )


def _cell(case: Case, seed: int) -> Stack:
    """Make a cell as training begins with it, but for its biases: what is zero hides where it is added."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        cell = make_cell(case.cell, case.hidden, case.hidden, case.layers)
        assert isinstance(cell, Stack), "only torch's own cells have a dense call to compare with"
        for weight in cell.parameters():
            weight.copy_(_rounded(weight if weight.dim() > 1 else weight + 0.1 * torch.randn_like(weight)))
    return cell


def dtype_of(precision: Precision) -> torch.dtype:
    """Say what numbers are stored in; tf32 is a way to multiply float32."""
    kinds = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    return kinds.get(precision, torch.float32)


def multiplying(precision: Precision) -> AbstractContextManager[None]:
    """Let matrix products of float32 be made in tf32, or not."""
    return products(tf32=precision == "tf32")


def _rounded(numbers: Tensor) -> Tensor:
    return numbers.to(torch.bfloat16).to(numbers.dtype)
