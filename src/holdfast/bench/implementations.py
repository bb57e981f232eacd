"""Implementations: our cells by each kernel, torch's dense call, a loop over steps, and TorchRL's kernel.

Each is a function of `x` alone, with weights and entry states cast to its precision beforehand, so that no cast is
timed. The dense call gets its input time-major, the layout it is fastest with; all others `[B,T]`, the layout of the
rollout buffer. Outputs and gradients are compared with the reference in float64.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import NamedTuple

import torch
from torch import nn

from holdfast.bench.cases import Case, CaseInputs, Precision, dtype_of
from holdfast.errors import ContractError
from holdfast.memory import Kernel, use_kernel
from holdfast.torch_versions import matmul_precision
from holdfast.types import Float, Tensor

OURS = ("holdfast", "triton")
"""Implementations that must be correct for exit code 0; `reset slots` is as correct as torch's call."""
TORCHRL = "torchrl.modules.tensordict_module._rnn_triton"
MAX_STEPWISE = 256 * 64 * 128
"""Largest size of the step-by-step loop: beyond it takes minutes."""
ROWS_PER_CHUNK = {"cpu": 256, "cuda": 1024}
"""Rows of the reference per chunk: its graph holds every gate of every step in float64."""


class CellOutputs(NamedTuple):
    """Output and gradients of a call."""

    y_BTH: Float[Tensor, "B T H"]
    x_grad_BTH: Float[Tensor, "B T H"]
    weight_grads: tuple[Tensor, ...]


@dataclass(frozen=True)
class Implementation:
    """A differentiable forward pass over a segment."""

    precision: Precision
    forward: Callable[[Float[Tensor, "a b D"]], Float[Tensor, "a b H"]]
    rnn: nn.Module
    """The module whose parameters are differentiated."""
    clears: bool = True
    """Whether it resets at episode starts."""
    capturable: bool = True
    """Whether it can be captured as a CUDA graph: the host never waits for the device."""
    time_major: bool = False
    dtype: torch.dtype = torch.float32
    """Dtype of its input."""

    def timed_call(self, x_BTH: Float[Tensor, "B T H"], grad_BTH: Float[Tensor, "B T H"]) -> Callable[[], CellOutputs]:
        """Return the timed call: forward and backward over prepared inputs, nothing else."""
        x, grad = self._to_layout(x_BTH).requires_grad_(), self._to_layout(grad_BTH)
        return partial(self._forward_backward, [x, *self.rnn.parameters()], grad)

    def _forward_backward(self, leaves: list[Tensor], grad: Tensor) -> CellOutputs:
        with matmul_precision(tf32=self.precision == "tf32"):
            y = self.forward(leaves[0])
            x_grad, *weight_grads = torch.autograd.grad(y, leaves, grad)
        if self.time_major:
            # Views, which take no time on the device.
            y, x_grad = y.transpose(0, 1), x_grad.transpose(0, 1)
        return CellOutputs(y, x_grad, tuple(weight_grads))

    def _to_layout(self, x_BTH: Float[Tensor, "B T H"]) -> Tensor:
        x = x_BTH.to(self.dtype)
        return x.transpose(0, 1).contiguous() if self.time_major else x.clone()


Make = Callable[[Case, CaseInputs, Precision], Implementation]


def ours(kernel: Kernel, case: Case, inputs: CaseInputs, precision: Precision) -> Implementation:
    """Our cell with one kernel; torch's needs reset slots, which the host counts."""
    dtype = dtype_of(precision)
    cell, state = copy.deepcopy(inputs.cell).to(dtype), inputs.state.to(dtype)
    use_kernel(cell, kernel)
    capturable = kernel != "torch"
    return Implementation(
        precision, lambda x_BTD: cell(x_BTD, state, inputs.clear_BT)[0], cell.rnn, capturable=capturable, dtype=dtype
    )


def dense(case: Case, inputs: CaseInputs, precision: Precision) -> Implementation:
    """torch.nn.LSTM or GRU, without resets."""
    dtype = dtype_of(precision)
    rnn = copy.deepcopy(inputs.cell.rnn).to(dtype)
    before = tuple(leaf.transpose(0, 1).to(dtype).contiguous() for leaf in inputs.state.values())
    entry = before if isinstance(rnn, nn.LSTM) else before[0]
    return Implementation(
        precision, lambda x_TBD: rnn(x_TBD, entry)[0], rnn, clears=False, time_major=True, dtype=dtype
    )


def step_by_step(case: Case, inputs: CaseInputs, precision: Precision) -> Implementation:
    """The reference: a loop over time."""
    if case.batch * case.steps * case.hidden * case.layers > MAX_STEPWISE:
        raise ContractError("it is measured up to 256 rows of 64 steps of 128 numbers; beyond it takes minutes.")
    dtype = dtype_of(precision)
    cell, state = copy.deepcopy(inputs.cell).to(dtype), inputs.state.to(dtype)
    return Implementation(
        precision, lambda x_BTD: cell.reference_forward(x_BTD, state, inputs.clear_BT)[0], cell.rnn, dtype=dtype
    )


def torchrl(case: Case, inputs: CaseInputs, precision: Precision) -> Implementation:
    """TorchRL's Triton kernel: float32 outside; inside, products in float32, tf32 or bfloat16."""
    if precision == "float16":
        raise ContractError("its kernel multiplies in float32 and bfloat16 only.")
    try:
        module = import_module(TORCHRL)
    except Exception as error:
        raise ContractError(f"it cannot be imported: {type(error).__name__}: {error}") from None
    cell, clear_BT = copy.deepcopy(inputs.cell).float(), inputs.clear_BT
    run = module.lstm_triton if case.cell == "lstm" else module.gru_triton
    # It takes the state to start from at every reset: the entry state at step 0, zeros elsewhere.
    start_states = [leaf.new_zeros(*clear_BT.shape, *leaf.shape[1:]) for leaf in inputs.state.values()]
    for leaf, entry in zip(start_states, inputs.state.values(), strict=True):
        leaf[:, 0] = torch.where(clear_BT[:, 0, None, None], 0.0, entry)
    start_states = [[leaf[:, :, layer].contiguous() for leaf in start_states] for layer in range(case.layers)]
    # Products outside its kernel use tf32 unless float32 is requested.
    modes = {"compute_dtype": dtype_of(precision), "input_precision": "ieee" if precision == "float32" else "tf32"}

    def forward(y_BTH: Tensor) -> Tensor:
        for layer, layer_states in enumerate(start_states):
            y_BTH = run(y_BTH, *layer_states, *cell.layer(layer), clear_BT, **modes)[0]
        return y_BTH

    return Implementation(precision, forward, cell.rnn)


IMPLEMENTATIONS: dict[str, Make] = {
    "holdfast": partial(ours, "auto"),
    "triton": partial(ours, "triton"),
    "dense": dense,
    "reset slots": partial(ours, "torch"),
    "torchrl": torchrl,
    "step by step": step_by_step,
}
ON_GPU_ONLY = {
    "triton": "its kernels run on a GPU.",
    "reset slots": "on a CPU it is the same as holdfast.",
    "torchrl": "its kernel runs on a GPU.",
}
"""Implementations that are not measured on a CPU, and why."""


def reference_outputs(inputs: CaseInputs, *, clears: bool) -> CellOutputs:
    """Run the reference in float64, with or without resets, in chunks of rows."""
    cell = copy.deepcopy(inputs.cell).double()
    clear_BT = inputs.clear_BT if clears else torch.zeros_like(inputs.clear_BT)
    weights, chunks = list(cell.rnn.parameters()), []
    all_rows = torch.arange(len(clear_BT), device=clear_BT.device)
    for rows in all_rows.split(ROWS_PER_CHUNK[clear_BT.device.type]):
        x = inputs.x_BTH[rows].double().requires_grad_()
        y = cell.reference_forward(x, inputs.state[rows].double(), clear_BT[rows])[0]
        grads = torch.autograd.grad(y, [x, *weights], inputs.grad_BTH[rows].double())
        with torch.no_grad():
            # A copy without the graph, so that one chunk's graph is alive at a time.
            chunks.append((y.clone(), *grads))
    ys, x_grads, *weight_grads = zip(*chunks, strict=True)
    return CellOutputs(torch.cat(ys), torch.cat(x_grads), tuple(torch.stack(grads).sum(0) for grads in weight_grads))


def errors_of(outputs: CellOutputs, truth: CellOutputs) -> tuple[float, float]:
    """Return the errors of output and gradients, relative to the largest entry of each; NaN stays NaN."""
    pairs = zip((outputs.x_grad_BTH, *outputs.weight_grads), (truth.x_grad_BTH, *truth.weight_grads), strict=True)
    gradients = torch.stack([_relative_error(actual, expected) for actual, expected in pairs])
    return float(_relative_error(outputs.y_BTH, truth.y_BTH)), float(gradients.amax())


@torch.no_grad()
def _relative_error(actual: Tensor, expected: Tensor) -> Tensor:
    # amax propagates NaN. Where all expected values are 0, as with nothing but starts, only 0 is right.
    error = (actual.double() - expected).abs().amax()
    return torch.where(error == 0, error, error / expected.abs().amax())


def outcome_of(outputs: CellOutputs) -> str:
    """Classify the result of huge inputs: ok, inf (overflow of the format) or NaN."""
    tensors = (outputs.y_BTH, outputs.x_grad_BTH, *outputs.weight_grads)
    if any(bool(tensor.isnan().any()) for tensor in tensors):
        return "NaN"
    return "inf" if any(bool(tensor.isinf().any()) for tensor in tensors) else "ok"
