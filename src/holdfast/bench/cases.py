"""Benchmark cases: sizes, and the inputs that every implementation gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal, get_args

import torch
from tensordict import TensorDict

from holdfast.memory import make_cell
from holdfast.memory.rnn import StackedRNN
from holdfast.rng import isolated_rng
from holdfast.types import Bool, Float, Tensor

CELLS = ("lstm", "gru")
Precision = Literal["float32", "tf32", "float16", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
HUGE = 1e4
"""Largest input that must not produce a NaN."""
Sizes = tuple[tuple[int, tuple[int, ...]], ...]
TARGETS: Sizes = ((128, (256, 1024, 4096)), (256, (256, 1024, 4096)), (512, (256, 1024)))
"""Hidden sizes and batch sizes measured on a GPU."""
ON_CPU: Sizes = ((128, (32, 64, 256, 1024)),)
"""Hidden sizes and batch sizes measured on a CPU."""
GPU_STARTS, CPU_STARTS = (0.02,), (0.0, 0.02, 0.1)
"""Fractions of steps that start an episode; on a GPU they cost nothing."""


@dataclass(frozen=True)
class Case:
    """One size; `starts` is the fraction of steps that start an episode."""

    cell: str
    hidden: int
    batch: int
    steps: int = 64
    layers: int = 1
    starts: float = 0.02

    def __str__(self) -> str:
        """Return a one-line name."""
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
    """Combine sizes; empty lists take the defaults of the device."""
    on_gpu = device.type == "cuda"
    defaults = TARGETS if on_gpu else ON_CPU
    cells = cells or (CELLS if on_gpu else CELLS[:1])
    starts = starts or (GPU_STARTS if on_gpu else CPU_STARTS)
    sizes = [(H, B) for H, rows in defaults for B in rows]
    if hidden or batch:
        all_batches = sorted({B for _, B in sizes})
        sizes = [(H, B) for H in hidden or [H for H, _ in defaults] for B in batch or all_batches]
    combinations = product(cells, sizes, steps or [64], starts)
    return [Case(cell, H, B, T, layers, fraction) for cell, (H, B), T, fraction in combinations]


@dataclass(frozen=True)
class CaseInputs:
    """Inputs of a case, exactly representable in all precisions."""

    cell: StackedRNN
    x_BTH: Float[Tensor, "B T H"]
    huge_BTH: Float[Tensor, "B T H"]
    """Inputs of up to 1e4."""
    state: TensorDict
    clear_BT: Bool[Tensor, "B T"]
    grad_BTH: Float[Tensor, "B T H"]
    """Gradient of the output."""


def draw(case: Case, device: torch.device, seed: int = 0) -> CaseInputs:
    """Draw the inputs of a case on a device: float32, rounded to bfloat16."""
    generator = torch.Generator(device).manual_seed(seed)
    cell = _cell(case, seed).to(device)
    shape = (case.batch, case.steps, case.hidden)
    uniform = partial(torch.rand, generator=generator, device=device)
    normal = partial(torch.randn, generator=generator, device=device)
    size = (case.batch, case.layers, case.hidden)
    entry = {leaf: _rounded(uniform(size) - 0.5) for leaf in cell.state_keys}
    return CaseInputs(
        cell=cell,
        x_BTH=_rounded(normal(shape)),
        huge_BTH=_rounded((2 * uniform(shape) - 1) * HUGE),
        state=TensorDict(entry, batch_size=[case.batch]),
        clear_BT=uniform(shape[:2]) < case.starts,
        grad_BTH=_rounded(normal(shape)),
    )


def _cell(case: Case, seed: int) -> StackedRNN:
    """Build a cell at initialization, but with random biases: zeros would hide where they are added."""
    with isolated_rng(seed), torch.no_grad():
        cell = make_cell(case.cell, case.hidden, case.hidden, case.layers)
        assert isinstance(cell, StackedRNN), "only LSTM and GRU have a dense call to compare with"
        for weight in cell.parameters():
            weight.copy_(_rounded(weight if weight.dim() > 1 else weight + 0.1 * torch.randn_like(weight)))
    return cell


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the storage dtype of a precision; tf32 is stored as float32."""
    return torch.float32 if precision == "tf32" else getattr(torch, precision)


def _rounded(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(values.dtype)
