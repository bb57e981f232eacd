"""Who is measured: our cell by each of its kernels, torch's dense call, step by step, and TorchRL's kernel.

Each is a function of `x` alone, with weights and entry states in its own precision: cast beforehand, so that
nobody is timed while casting. The dense call is handed its input time-major, as it likes it best; all others
`[B,T]`, as segments lie in a buffer.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch
from torch import nn

from holdfast.bench.cases import Case, Numbers, Precision, dtype_of
from holdfast.errors import ContractError
from holdfast.memory import Kernel, use_kernel
from holdfast.memory.stack import Stack
from holdfast.shapes import Float, Tensor

OURS = ("holdfast", "triton")
"""Who must be right for the bench to end well; blank steps are as right as torch's own call."""
TORCHRL = "torchrl.modules.tensordict_module._rnn_triton"
SMALL = 256 * 64 * 128
"""Step by step is measured up to so many numbers: beyond, it takes minutes."""


@dataclass(frozen=True)
class Rival:
    """One way to run a segment forwards, so that gradients can be asked of it."""

    name: str
    precision: Precision
    forward: Callable[[Float[Tensor, "a b D"]], Float[Tensor, "a b H"]]
    weights: list[Tensor]
    """Whose gradients are asked for, in the order of the cell's parameters."""
    clears: bool = True
    """Whether it forgets where episodes start."""
    records: bool = True
    """Whether it may be recorded as a CUDA graph: the host never waits for the device."""
    time_major: bool = False
    kept_in: torch.dtype = torch.float32
    """The kind of numbers it is handed."""

    @property
    def ours(self) -> bool:
        """Whether it is Holdfast's, and must be right."""
        return self.name in OURS


Make = Callable[[Case, Numbers, Precision], Rival]


def holdfast(case: Case, numbers: Numbers, precision: Precision) -> Rival:
    """Our cell, by whichever kernel is the fastest here."""
    return _ours("holdfast", "auto", numbers, precision)


def triton(case: Case, numbers: Numbers, precision: Precision) -> Rival:
    """Our cell, by our kernels."""
    return _ours("triton", "triton", numbers, precision)


def blank_steps(case: Case, numbers: Numbers, precision: Precision) -> Rival:
    """Our cell by torch's call, with a blank step before each start, which the host has to count."""
    return _ours("blank steps", "torch", numbers, precision, records=False)


def dense(case: Case, numbers: Numbers, precision: Precision) -> Rival:
    """Torch's own call, which clears nothing."""
    kept_in = dtype_of(precision)
    rnn = copy.deepcopy(numbers.cell.rnn).to(kept_in)
    before = tuple(leaf.transpose(0, 1).to(kept_in).contiguous() for leaf in numbers.state.values())
    entry = before if isinstance(rnn, nn.LSTM) else before[0]
    return Rival(
        "dense",
        precision,
        lambda x_TBD: rnn(x_TBD, entry)[0],
        list(rnn.parameters()),
        clears=False,
        time_major=True,
        kept_in=kept_in,
    )


def step_by_step(case: Case, numbers: Numbers, precision: Precision) -> Rival:
    """The reference: a loop over time."""
    if case.batch * case.steps * case.hidden * case.layers > SMALL:
        raise ContractError(
            "it is measured up to 256 rows of 64 steps of 128 numbers; beyond it takes minutes."
        )
    cell = _cell_in(numbers, dtype_of(precision))
    state, clear_BT = numbers.state.to(dtype_of(precision)), numbers.clear_BT
    return Rival(
        "step by step",
        precision,
        lambda x_BTD: cell.plain(x_BTD, state, clear_BT)[0],
        list(cell.rnn.parameters()),
        kept_in=dtype_of(precision),
    )


def torchrl(case: Case, numbers: Numbers, precision: Precision) -> Rival:
    """TorchRL's Triton kernel: float32 outside; inside its products are float32, tf32 or bfloat16."""
    if precision == "float16":
        raise ContractError("its kernel multiplies in float32 and bfloat16 only.")
    try:
        theirs = import_module(TORCHRL)
    except Exception as error:
        raise ContractError(f"it is not to be had here: {type(error).__name__}: {error}") from None
    cell, clear_BT = _cell_in(numbers, torch.float32), numbers.clear_BT
    run = theirs.lstm_triton if case.cell == "lstm" else theirs.gru_triton
    # It reads what a row begins anew with at every start; at step 0 that is the entry state, or nothing.
    begun = [leaf.new_zeros(*clear_BT.shape, *leaf.shape[1:]) for leaf in numbers.state.values()]
    for leaf, entry in zip(begun, numbers.state.values(), strict=True):
        leaf[:, 0] = torch.where(clear_BT[:, 0, None, None], 0.0, entry)
    begun = [[leaf[:, :, layer].contiguous() for leaf in begun] for layer in range(case.layers)]
    kind = dtype_of(precision)
    # What lies outside its kernel may be tf32 wherever float32 is not asked for.
    how = "ieee" if precision == "float32" else "tf32"

    def forward(y_BTH: Tensor) -> Tensor:
        for layer, its_begun in enumerate(begun):
            weights = cell.layer(layer)
            y_BTH = run(y_BTH, *its_begun, *weights, clear_BT, compute_dtype=kind, input_precision=how)[0]
        return y_BTH

    return Rival("torchrl", precision, forward, list(cell.rnn.parameters()))


RIVALS: dict[str, Make] = {
    "holdfast": holdfast,
    "triton": triton,
    "dense": dense,
    "blank steps": blank_steps,
    "torchrl": torchrl,
    "step by step": step_by_step,
}
ON_GPU_ONLY = {
    "triton": "its kernels run on a GPU.",
    "blank steps": "on a CPU it is what holdfast is.",
    "torchrl": "its kernel runs on a GPU.",
}
"""Who is not measured on a CPU, and why."""


def _ours(
    name: str, kernel: Kernel, numbers: Numbers, precision: Precision, *, records: bool = True
) -> Rival:
    kept_in = dtype_of(precision)
    cell, state = _cell_in(numbers, kept_in), numbers.state.to(kept_in)
    use_kernel(cell, kernel)
    return Rival(
        name,
        precision,
        lambda x_BTD: cell(x_BTD, state, numbers.clear_BT)[0],
        list(cell.rnn.parameters()),
        records=records,
        kept_in=kept_in,
    )


def _cell_in(numbers: Numbers, dtype: torch.dtype) -> Stack:
    return copy.deepcopy(numbers.cell).to(dtype)
