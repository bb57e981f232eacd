"""Log-probabilities of logits, a sampled action and its log-probability, as one Triton kernel."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from holdfast.types import Float, Int, Tensor

MOST_ACTIONS = 256
"""With more, a program's rows do not fit into registers."""
CELLS = 2048
"""Numbers that a program computes on."""


@triton.jit
@no_type_check
def _sample(
    logits_ptr, draws_ptr, params_ptr, actions_ptr, log_prob_ptr, count, n, stride, draw_stride, least,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    is_row, is_action = rows < count, columns < n
    inside = is_row[:, None] & is_action[None, :]
    x = tl.load(logits_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=inside, other=-1e30)
    x = x - tl.max(x, axis=1)[:, None]
    x = tl.maximum(x - tl.log(tl.sum(tl.exp(x), axis=1))[:, None], least)
    tl.store(params_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :], x, mask=inside)
    probability = tl.where(inside, tl.exp(x), 0.0)
    cumulative = tl.cumsum(probability, axis=1)
    point = tl.load(draws_ptr + rows.to(tl.int64) * draw_stride, mask=is_row, other=0.0) * tl.max(cumulative, axis=1)
    # Sums in parallel may round down from one action to the next: only actions with a probability count.
    is_possible = probability > 0
    first = tl.min(tl.where(is_possible & (cumulative > point[:, None]), columns[None, :], WIDTH), axis=1)
    last = tl.max(tl.where(is_possible, columns[None, :], 0), axis=1)
    action = tl.minimum(first, last)
    tl.store(actions_ptr + rows, action.to(tl.int64), mask=is_row)
    is_chosen = columns[None, :] == action[:, None]
    tl.store(log_prob_ptr + rows, tl.sum(tl.where(is_chosen & inside, x, 0.0), axis=1), mask=is_row)


def sample_actions(
    logits: Float[Tensor, "N n"], draws: Float[Tensor, " N"]
) -> tuple[Float[Tensor, "N n"], Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Return log-probabilities, actions, and the log-probability of each action."""
    count, n = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    params = torch.empty(count, n, device=logits.device)
    actions = torch.empty(count, dtype=torch.int64, device=logits.device)
    log_prob = torch.empty(count, device=logits.device)
    width = triton.next_power_of_2(n)
    rows = max(1, min(64, CELLS // width))
    inputs = (logits, draws, params, actions, log_prob, count, n, logits.stride(0), draws.stride(0))
    least = torch.finfo(torch.float32).min
    _sample[(triton.cdiv(count, rows),)](*inputs, least, ROWS=rows, WIDTH=width)
    return params, actions, log_prob
