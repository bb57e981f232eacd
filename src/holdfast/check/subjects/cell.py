"""The cell of one of Holdfast's policies against itself written out step by step, by every kernel it has."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from tensordict import TensorDict

from holdfast.check.case import AGENTS, STEPS, Case
from holdfast.check.compare import BOUND, SHORT, close
from holdfast.check.results import Measurement
from holdfast.memory import Cell, Kernel, use_kernel
from holdfast.memory.kernels import refusal
from holdfast.memory.stack import Stack
from holdfast.policies import LSTMWrapper
from holdfast.policies.precision import computing, widened
from holdfast.shapes import Tensor

GRADIENT_BOUND = {torch.float64: 2e-5, torch.float32: 2e-5, torch.bfloat16: 5e-2}
"""How far gradients may be off, as a share of the largest entry.

In bfloat16 two right ways to add up a cell were found 2.2e-2 apart at most (GRU of 16; the LSTM 9e-3, over 32
steps, hidden sizes 16 to 512, one and two layers): a gradient sums as many roundings of 4e-3 as it has steps.
A gate without its gradient, or a step left out, is off by 0.1 to 1.
"""
Gradients = Sequence[Tensor | None]


def random_state(case: Case) -> TensorDict:
    """Make a state that is not empty."""
    generator = torch.Generator().manual_seed(2)
    state = cast("LSTMWrapper", case.subject.module).lstm.cell.initial(AGENTS)
    return cast(
        "TensorDict", state.apply(lambda leaf: torch.rand(leaf.shape, generator=generator).to(leaf) - 0.5)
    )


def same_gradients(what: str, now: Gradients, was: Gradients, about: str, kind: torch.dtype) -> Measurement:
    """Demand that gradients are equal to within a share of each one's largest entry.

    What is a billionth of the largest of all is rounding: that of a bias which all actions share is.
    """
    largest = max((float(b.abs().max()) for b in was if b is not None), default=0.0)
    errors = [
        (a - b).abs().max() / b.abs().max().clamp(min=max(1e-9 * largest, torch.finfo(b.dtype).tiny))
        for a, b in zip(now, was, strict=True)
        if a is not None and b is not None
    ]
    size = float(torch.stack([error.double() for error in errors]).max())
    found = f"off by {size:.1e} of the largest entry"
    return Measurement(what, size, GRADIENT_BOUND[kind], finding=found, about=about)


def cell_agrees(case: Case) -> Iterator[Measurement]:
    """Hold the policy's cell against itself written out step by step, gradients included."""
    cell = cast("LSTMWrapper", case.subject.module).lstm.cell
    kernels = _kernels(cell, case)
    if not kernels:
        yield from _agrees(cell, case, SHORT[case.kind])
    for kernel in kernels:
        use_kernel(cell, kernel)
        try:
            yield from _agrees(cell, case, f"{kernel}, {SHORT[case.kind]}")
        finally:
            use_kernel(cell, "auto")


def _kernels(cell: Cell, case: Case) -> tuple[Kernel, ...]:
    """Where a GPU may choose between torch's kernel and ours, both are measured, whichever it would take."""
    stacks = [part for part in cell.modules() if isinstance(part, Stack)]
    open_to_choice = bool(stacks) and all(
        stack.kernel == "auto" and refusal(case.device, stack.hidden_size) is None for stack in stacks
    )
    return ("torch", "triton") if open_to_choice and case.device.type == "cuda" else ()


def _agrees(cell: Cell, case: Case, told: str) -> Iterator[Measurement]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(AGENTS, STEPS, cell.input_size, generator=generator).to(case.device, case.dtype)
    clear = (torch.rand(AGENTS, STEPS, generator=generator) < 0.12).to(case.device)
    towards = torch.randn(AGENTS, STEPS, cell.output_size, generator=generator).to(x)
    state, inputs = random_state(case), [x.requires_grad_(), *cell.parameters()]
    precision = "bfloat16" if case.kind == torch.bfloat16 else "float32"
    said, ends, gradients = [], [], []
    with torch.enable_grad():
        for call in (cell, cell.plain):
            with computing(precision, case.device):
                y, end = call(x, state, clear)
            said.append(widened(y))
            ends.append(end)
            gradients.append(torch.autograd.grad((said[-1] * towards).sum(), inputs))
    bound = BOUND[case.kind]
    yield close(f"cell as reference, {told}", said[0], said[1], bound, about="cell")
    for key in ends[0].keys():  # noqa: SIM118
        yield close(f"its state, {told}", ends[0][key], ends[1][key], bound, about="cell")
    yield same_gradients(f"its gradients, {told}", gradients[0], gradients[1], "cell", case.kind)
