"""The kernels as torch operators, for CUDA graphs, `torch.compile` and autograd; and their launches."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from math import ceil
from types import ModuleType
from typing import Any

import torch
from torch.library import custom_op, register_autograd
from triton import next_power_of_2

from holdfast.cuda_graphs import constant
from holdfast.memory.kernels import gru as gru_kernels
from holdfast.memory.kernels import lstm as lstm_kernels
from holdfast.memory.kernels.autotune import Launch, LaunchPlan, TuningJob, choose_plan, processors_of
from holdfast.memory.reference import LayerWeights
from holdfast.torch_versions import recurrent_tf32
from holdfast.types import Float, Tensor, UInt8

Tensors = tuple[Tensor, ...]


def lstm(
    x: Float[Tensor, "B T D"],
    weights: LayerWeights,
    h: Float[Tensor, "B H"],
    c: Float[Tensor, "B H"],
    code: UInt8[Tensor, "B T"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B H"], Float[Tensor, "B H"]]:
    """Run one LSTM layer over segments; a step's code: 1 clear, 2 invalid, 3 both.

    The input already contains the biases; the operators take them too, to compute their gradients: a
    product with ones is three times as fast as torch's sum.
    """
    weight_ih, weight_hh, bias_ih, bias_hh = (_cast(weight, dtype) for weight in weights)
    bias = constant(weights[2], (dtype, "sum"), lambda: bias_ih + bias_hh)
    gates = torch.nn.functional.linear(x.to(dtype), weight_ih, bias.detach())
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (gates, weight_hh, bias, h, c))
    outputs = _lstm(gates, weight_hh, bias, h.contiguous(), c.contiguous(), code, keep, _precision(dtype))
    return outputs[0], outputs[1], outputs[2]


def gru(
    x: Float[Tensor, "B T D"],
    weights: LayerWeights,
    h: Float[Tensor, "B H"],
    code: UInt8[Tensor, "B T"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B H"]]:
    """Run one GRU layer over segments."""
    weight_ih, weight_hh, bias_ih, bias_hh = (_cast(weight, dtype) for weight in weights)
    bias_rz, bias_n = bias_hh.split([2 * weight_hh.shape[1], weight_hh.shape[1]])
    # The candidate's recurrent bias is scaled by the reset gate: the kernel adds it.
    bias = bias_ih + torch.cat([bias_rz, torch.zeros_like(bias_n)])
    gates = torch.nn.functional.linear(x.to(dtype), weight_ih, bias.detach())
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (gates, weight_hh, bias, bias_n, h))
    outputs = _gru(gates, weight_hh, bias, bias_n, h.contiguous(), code, keep, _precision(dtype))
    return outputs[0], outputs[1]


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return constant(weight, dtype, lambda: weight.to(dtype))


def _precision(dtype: torch.dtype) -> str:
    """Return the precision of float32 products, as set for torch's recurrent layers."""
    return "tf32" if dtype != torch.float32 or recurrent_tf32() else "tf32x3"


def _launch_fastest(kernel: str, x: Tensor, w: Tensor, precision: str, launch: Launch, *, keep: bool = True) -> Any:
    """Launch a kernel by the fastest plan, on the tensors' device: Triton uses the current GPU."""
    B, T = x.shape[:2]
    job = TuningJob(kernel, w.shape[1], B, T == 1, w.dtype, precision, keep)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        return launch(choose_plan(job, x.device, launch))


@custom_op("holdfast::lstm", mutates_args=())
def _lstm(
    x: Tensor, w: Tensor, bias: Tensor, h: Tensor, c: Tensor, code: Tensor, keep: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    launch = partial(run_forward, lstm_kernels, (x, w), (h, c), code, keep, precision)
    return _launch_fastest("lstm_forward", x, w, precision, launch, keep=keep)


@_lstm.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor, h: Tensor, c: Tensor, code: Tensor, keep: bool, *_: Any) -> Tensors:
    y, h_prev, gates = _like(x, w, keep)
    cells = torch.empty_like(h_prev, dtype=torch.float32)
    return y, torch.empty_like(h), torch.empty_like(c), h_prev, cells, gates


@custom_op("holdfast::lstm_backward", mutates_args=())
def _lstm_backward(
    w: Tensor, c: Tensor, code: Tensor, cells: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, dc: Tensor | None, entry: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    launch = partial(run_backward, lstm_kernels, (w, c, code, cells), gates, c, dy, (dh, dc), entry, precision)
    return _launch_fastest("lstm_backward", gates, w, precision, launch)


@_lstm_backward.register_fake
def _(w: Tensor, c: Tensor, code: Tensor, cells: Tensor, gates: Tensor, *_: Any) -> Tensors:
    states = torch.empty_like(c, dtype=torch.float32), torch.empty_like(c, dtype=torch.float32)
    return torch.empty_like(gates), *states


@custom_op("holdfast::gru", mutates_args=())
def _gru(
    x: Tensor, w: Tensor, bias: Tensor, bias_n: Tensor, h: Tensor, code: Tensor, keep: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    launch = partial(run_forward, gru_kernels, (x, w, bias_n), (h,), code, keep, precision)
    return _launch_fastest("gru_forward", x, w, precision, launch, keep=keep)


@_gru.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor, bias_n: Tensor, h: Tensor, code: Tensor, keep: bool, *_: Any) -> Tensors:
    y, h_prev, gates = _like(x, w, keep)
    return y, torch.empty_like(h), h_prev, gates


@custom_op("holdfast::gru_backward", mutates_args=())
def _gru_backward(
    w: Tensor, h: Tensor, code: Tensor, h_prev: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, entry: bool, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    launch = partial(run_backward, gru_kernels, (w, code, h_prev), gates, h, dy, (dh,), entry, precision)
    return _launch_fastest("gru_backward", gates, w, precision, launch)


@_gru_backward.register_fake
def _(w: Tensor, h: Tensor, code: Tensor, h_prev: Tensor, gates: Tensor, *_: Any) -> Tensors:
    return torch.empty_like(gates), torch.empty_like(h, dtype=torch.float32)


def _like(x: Tensor, w: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H = *x.shape[:2], w.shape[1]
    saved = (x.new_empty(B, T, H), x.new_empty(B, T, 4 * H)) if keep else (x.new_empty(0), x.new_empty(0))
    return x.new_empty(B, T, H), *saved


def _lstm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, w, _, _, c, code, _, ctx.precision = inputs
    _, _, _, h_prev, cells, gates = output
    ctx.save_for_backward(w, c, code, h_prev, cells, gates)
    ctx.set_materialize_grads(False)


def _lstm_gradients(
    ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    w, c, code, h_prev, cells, gates = ctx.saved_tensors
    entry = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    dy = _grad_or_zeros(dy, h_prev)
    dgates, *states = _lstm_backward(w, c, code, cells, gates, dy, dh, dc, entry, ctx.precision)
    dh_in, dc_in = (state.to(c.dtype) for state in states) if entry else (None, None)
    dw = dgates.flatten(0, 1).T @ h_prev.flatten(0, 1)
    return dgates, dw, _sum_steps(dgates), dh_in, dc_in, None, None, None


def _gru_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, w, _, _, h, code, _, ctx.precision = inputs
    _, _, h_prev, gates = output
    ctx.save_for_backward(w, h, code, h_prev, gates)
    ctx.set_materialize_grads(False)


def _gru_gradients(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    w, h, code, h_prev, gates = ctx.saved_tensors
    entry = ctx.needs_input_grad[4]
    dy = _grad_or_zeros(dy, h_prev)
    dgates, dh_in = _gru_backward(w, h, code, h_prev, gates, dy, dh, entry, ctx.precision)
    H = w.shape[1]
    # Gradients are in the order n_h, r, z, n: see gru.py.
    n, r_and_z = (dgates[..., : 3 * H].flatten(0, 1).T @ h_prev.flatten(0, 1)).split([H, 2 * H])
    bias_n, bias = _sum_steps(dgates).split([H, 3 * H])
    dh_in = dh_in.to(h.dtype) if entry else None
    return dgates[..., H:], torch.cat([r_and_z, n]), bias, bias_n, dh_in, None, None, None


def _sum_steps(dgates: Tensor) -> Tensor:
    """Sum over rows and steps."""
    flat = dgates.flatten(0, 1)
    return flat.new_ones(len(flat)) @ flat


def _grad_or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.to(like.dtype).contiguous()


register_autograd(_lstm, _lstm_gradients, setup_context=_lstm_context)
register_autograd(_gru, _gru_gradients, setup_context=_gru_context)


def run_forward(
    kernels: ModuleType, inputs: Sequence[Tensor], states: Sequence[Tensor], code: Tensor,
    keep: bool, precision: str, plan: LaunchPlan,
) -> Tensors:  # fmt: skip
    """Run a segment; return `y, h, c` and what the backward pass needs: h_prev, cells, gates. A GRU has no c, no cells.

    `inputs`: the gates' inputs and the recurrent weights, of a GRU also the candidate's bias.
    """
    layout = LaunchLayout(inputs[0], inputs[1].shape[1], plan, precision)
    y, h_prev, gates = layout.outputs(keep, states[0], code)
    cells = [torch.empty_like(y if keep else y.new_empty(0), dtype=torch.float32) for _ in states[1:]]
    settings = {"SAVE": keep, **layout.settings}
    for begin, end in layout.spans():
        before, states = states, [torch.empty_like(state) for state in states]
        for grid, rest in layout.waves(begin, end):
            kernels.forward[grid](*inputs, *before, code, y, h_prev, *cells, gates, *states, *rest, **settings)
    return y, *states, h_prev if keep else y.new_empty(0), *cells, gates


def run_backward(
    kernels: ModuleType, inputs: Sequence[Tensor], gates: Tensor, state: Tensor, dy: Tensor,
    grads: Sequence[Tensor | None], entry: bool, precision: str, plan: LaunchPlan,
) -> Tensors:  # fmt: skip
    """Run the backward pass; return gradients `[B,T,4H]` (of a GRU: see gru.py) and, if `entry`, of the entry state.

    `inputs`: all that the kernel reads before the gates; `grads`: the gradients of the last state.
    """
    layout = LaunchLayout(gates, inputs[0].shape[1], plan, precision)
    dgates, has_grad = torch.empty_like(gates), any(gradient is not None for gradient in grads)
    states = [_grad_of_last_state(gradient, state, has_grad) for gradient in grads]
    for begin, end in layout.spans(backward=True):
        after, states = states, [torch.empty_like(gradient) for gradient in states]
        settings = {"GRAD_OUT": has_grad, "ENTRY_GRAD": entry, **layout.settings}
        for grid, rest in layout.waves(begin, end):
            kernels.backward[grid](*inputs, gates, dy, *after, dgates, *states, *rest, **settings)
        has_grad = True
    return dgates, *states


def _grad_of_last_state(gradient: Tensor | None, state: Tensor, has_grad: bool) -> Tensor:
    """Return a last state's gradient in float32; uninitialized if none is given: it is not read."""
    if gradient is None:
        make = torch.zeros_like if has_grad else torch.empty_like
        return make(state, dtype=torch.float32)
    return gradient.float().contiguous()


class LaunchLayout:
    """Programs of each launch over one batch of segments `[B,T,...]`."""

    def __init__(self, x: Tensor, hidden: int, plan: LaunchPlan, precision: str) -> None:
        self._like, self._hidden, self._plan = x, hidden, plan
        self.B, self.T = x.shape[:2]
        padded = max(16, next_power_of_2(hidden))
        units = min(plan.units, padded)
        self.splits = ceil(hidden / units)
        chunk = padded if self.splits == 1 else min(plan.chunk, padded)
        # A single step exchanges nothing; the interpreter runs programs one after the other.
        self._cooperative = self.splits > 1 and self.T > 1 and x.is_cuda
        self.settings: dict[str, Any] = {
            "H": hidden, "CHUNK": chunk, "CHUNKS": ceil(hidden / chunk),
            "STAGES": plan.stages if self.splits > 1 else 0,
            "ROWS": plan.rows, "UNITS": units, "SPLITS": self.splits,
            "COOPERATIVE": self._cooperative, "PRECISION": precision, "num_warps": plan.warps,
            "num_stages": 1, "APPROX": x.dtype != torch.float32 and x.is_cuda,
        }  # fmt: skip
        if self._cooperative:
            # All programs start at once or the launch fails: none waits for one that cannot start.
            self.settings["launch_cooperative_grid"] = True

    def outputs(self, keep: bool, h: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Allocate y, h_prev and gates; split layers exchange states through h_prev."""
        like = self._like
        size = (self.B, self.T, self._hidden)
        y = like.new_empty(size)
        h_prev = like.new_empty(size if keep or self.splits > 1 else 0)
        if self._cooperative and self._plan.stages == 0:
            # All bits set: the mark of values not yet written.
            h_prev.view(torch.int16).fill_(-1)
        elif self.splits > 1 and not self._cooperative:
            h_prev[:, 0] = torch.where(code[:, :1] & 1 != 0, 0.0, h)
        return y, h_prev, like.new_empty((*size[:2], 4 * self._hidden) if keep else 0)

    def spans(self, *, backward: bool = False) -> list[tuple[int, int]]:
        """Return the step range of each launch; backward, the last one finishes step 0."""
        if self.splits == 1 or self._cooperative:
            return [(0, self.T)]
        steps = [(t, t + 1) for t in range(self.T)]
        return [*reversed(steps), (0, 0)] if backward else steps

    def waves(self, begin: int, end: int) -> Iterator[tuple[tuple[int], tuple[Any, ...]]]:
        """Yield grids and arguments; cooperative programs must all fit on the chip at once."""
        like = self._like
        groups = ceil(self.B / self._plan.rows)
        at_once = max(1, self._plan.share * processors_of(like.device) // self.splits) if self._cooperative else groups
        for first in range(0, groups, at_once):
            count = min(at_once, groups - first)
            counters = torch.zeros(count, dtype=torch.int32, device=like.device) if self._cooperative else like
            yield (count * self.splits,), (counters, self.B, self.T, begin, end, first * self._plan.rows)
