"""The kernels as operators of torch: graphs record them, `torch.compile` calls them, gradients go through."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.library import custom_op, register_autograd

from holdfast.memory.kernels import launch
from holdfast.memory.kernels.launch import Plan
from holdfast.memory.kernels.plans import Job
from holdfast.memory.kernels.tuning import choose
from holdfast.memory.reference import LayerWeights
from holdfast.shapes import Float, Tensor, UInt8


def lstm(
    x: Float[Tensor, "B T D"],
    weights: LayerWeights,
    h: Float[Tensor, "B H"],
    c: Float[Tensor, "B H"],
    code: UInt8[Tensor, "B T"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B H"], Float[Tensor, "B H"]]:
    """Run one LSTM layer over segments; a step's code: 1 clears, 2 nobody acts, 3 both.

    The operators get the biases that are in their input already, to make their gradients: a product with
    ones is three times as fast as torch's sum.
    """
    weight_ih, weight_hh, bias_ih, bias_hh = (weight.to(dtype) for weight in weights)
    bias = bias_ih + bias_hh
    gates = torch.nn.functional.linear(x.to(dtype), weight_ih, bias.detach())
    keep = torch.is_grad_enabled() and any(each.requires_grad for each in (gates, weight_hh, bias, h, c))
    told = _lstm(gates, weight_hh, bias, h.contiguous(), c.contiguous(), code, keep, _precision(dtype))
    return told[0], told[1], told[2]


def gru(
    x: Float[Tensor, "B T D"],
    weights: LayerWeights,
    h: Float[Tensor, "B H"],
    code: UInt8[Tensor, "B T"],
    dtype: torch.dtype,
) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "B H"]]:
    """Run one GRU layer over segments."""
    weight_ih, weight_hh, bias_ih, bias_hh = (weight.to(dtype) for weight in weights)
    both, own = bias_hh.split([2 * weight_hh.shape[1], weight_hh.shape[1]])
    # The candidate's own bias is scaled by a gate and comes later.
    bias = bias_ih + torch.cat([both, torch.zeros_like(own)])
    gates = torch.nn.functional.linear(x.to(dtype), weight_ih, bias.detach())
    keep = torch.is_grad_enabled() and any(each.requires_grad for each in (gates, weight_hh, bias, own, h))
    told = _gru(gates, weight_hh, bias, own, h.contiguous(), code, keep, _precision(dtype))
    return told[0], told[1]


def _precision(dtype: torch.dtype) -> str:
    """Whether float32 products may be rounded to tf32, as torch's own recurrent layers ask."""
    cudnn: Any = torch.backends.cudnn
    exact = dtype == torch.float32 and cudnn.rnn.fp32_precision != "tf32"
    return "tf32x3" if exact else "tf32"


def _beside(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch where a tensor lies: Triton asks which GPU is the current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _job(kernel: str, x: Tensor, w: Tensor, precision: str, keep: bool = True) -> Job:
    B, T = x.shape[:2]
    return Job(kernel, w.shape[1], B, T == 1, w.dtype, precision, keep)


@custom_op("holdfast::lstm", mutates_args=())
def _lstm(
    x: Tensor, w: Tensor, bias: Tensor, h: Tensor, c: Tensor, code: Tensor, keep: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def run(plan: Plan) -> tuple[Tensor, ...]:
        return launch.lstm_forward(x, w, h, c, code, keep=keep, precision=precision, plan=plan)

    with _beside(x):
        return _own(run(choose(_job("lstm_forward", x, w, precision, keep), x.device, run)), 3, keep)


@_lstm.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor, h: Tensor, c: Tensor, code: Tensor, keep: bool, precision: str
) -> tuple[Tensor, ...]:
    y, entered, gates = _like(x, w, keep)
    cells = torch.empty_like(entered, dtype=torch.float32)
    return y, torch.empty_like(h), torch.empty_like(c), entered, cells, gates


@custom_op("holdfast::lstm_backward", mutates_args=())
def _lstm_backward(
    w: Tensor, c: Tensor, code: Tensor, cells: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, dc: Tensor | None, entry: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def run(plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        return launch.lstm_backward(
            w, c, code, cells, gates, dy, dh, dc, entry=entry, precision=precision, plan=plan
        )

    with _beside(w):
        return run(choose(_job("lstm_backward", gates, w, precision), w.device, run))


@_lstm_backward.register_fake
def _(
    w: Tensor, c: Tensor, code: Tensor, cells: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, dc: Tensor | None, entry: bool, precision: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    states = torch.empty_like(c, dtype=torch.float32), torch.empty_like(c, dtype=torch.float32)
    return torch.empty_like(gates), *states


@custom_op("holdfast::gru", mutates_args=())
def _gru(
    x: Tensor, w: Tensor, bias: Tensor, own: Tensor, h: Tensor, code: Tensor, keep: bool, precision: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def run(plan: Plan) -> tuple[Tensor, ...]:
        return launch.gru_forward(x, w, own, h, code, keep=keep, precision=precision, plan=plan)

    with _beside(x):
        return _own(run(choose(_job("gru_forward", x, w, precision, keep), x.device, run)), 2, keep)


@_gru.register_fake
def _(
    x: Tensor, w: Tensor, bias: Tensor, own: Tensor, h: Tensor, code: Tensor, keep: bool, precision: str
) -> tuple[Tensor, ...]:
    y, entered, gates = _like(x, w, keep)
    return y, torch.empty_like(h), entered, gates


@custom_op("holdfast::gru_backward", mutates_args=())
def _gru_backward(
    w: Tensor, h: Tensor, code: Tensor, entered: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, entry: bool, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def run(plan: Plan) -> tuple[Tensor, Tensor]:
        return launch.gru_backward(
            w, h, code, entered, gates, dy, dh, entry=entry, precision=precision, plan=plan
        )

    with _beside(w):
        return run(choose(_job("gru_backward", gates, w, precision), w.device, run))


@_gru_backward.register_fake
def _(
    w: Tensor, h: Tensor, code: Tensor, entered: Tensor, gates: Tensor,
    dy: Tensor, dh: Tensor | None, entry: bool, precision: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(gates), torch.empty_like(h, dtype=torch.float32)


def _own(told: tuple[Tensor, ...], first: int, keep: bool) -> Any:
    """Give back what was kept for gradients only if it was asked for: what was handed over is nobody's."""
    return told if keep else (*told[:first], *(each.new_empty(0) for each in told[first:]))


def _like(x: Tensor, w: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    B, T, H = *x.shape[:2], w.shape[1]
    kept = (x.new_empty(B, T, H), x.new_empty(B, T, 4 * H)) if keep else (x.new_empty(0), x.new_empty(0))
    return x.new_empty(B, T, H), *kept


def _lstm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, w, _, _, c, code, _, ctx.precision = inputs
    _, _, _, entered, cells, gates = output
    ctx.save_for_backward(w, c, code, entered, cells, gates)
    ctx.set_materialize_grads(False)


def _lstm_gradients(
    ctx: Any, dy: Tensor | None, dh: Tensor | None, dc: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    w, c, code, entered, cells, gates = ctx.saved_tensors
    entry = ctx.needs_input_grad[3] or ctx.needs_input_grad[4]
    pulled = _pull(dy, entered)
    dgates, *states = _lstm_backward(w, c, code, cells, gates, pulled, dh, dc, entry, ctx.precision)
    dh_in, dc_in = (state.to(c.dtype) for state in states) if entry else (None, None)
    dw = dgates.flatten(0, 1).T @ entered.flatten(0, 1)
    return dgates, dw, _summed(dgates), dh_in, dc_in, None, None, None


def _gru_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, w, _, _, h, code, _, ctx.precision = inputs
    _, _, entered, gates = output
    ctx.save_for_backward(w, h, code, entered, gates)
    ctx.set_materialize_grads(False)


def _gru_gradients(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    w, h, code, entered, gates = ctx.saved_tensors
    entry = ctx.needs_input_grad[4]
    dgates, dh_in = _gru_backward(w, h, code, entered, gates, _pull(dy, entered), dh, entry, ctx.precision)
    H = w.shape[1]
    # They are those of the hidden state's part of n, then of r, z and the input's part of n.
    n, r_and_z = (dgates[..., : 3 * H].flatten(0, 1).T @ entered.flatten(0, 1)).split([H, 2 * H])
    own, bias = _summed(dgates).split([H, 3 * H])
    dh_in = dh_in.to(h.dtype) if entry else None
    return dgates[..., H:], torch.cat([r_and_z, n]), bias, own, dh_in, None, None, None


def _summed(dgates: Tensor) -> Tensor:
    """Sum over rows and steps."""
    flat = dgates.flatten(0, 1)
    return flat.new_ones(len(flat)) @ flat


def _pull(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient.to(like.dtype).contiguous()


register_autograd(_lstm, _lstm_gradients, setup_context=_lstm_context)
register_autograd(_gru, _gru_gradients, setup_context=_gru_context)
