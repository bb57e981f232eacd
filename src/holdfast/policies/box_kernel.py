"""Tokens to a box as one Triton kernel; imported where it is about to run."""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl

from holdfast.types import Float, Tensor, UInt8
from holdfast.worlds.tokens import GLOBAL

PROGRAMS = 8
"""Programs per multiprocessor: each fills one box after the other in a scratch row that stays in the cache."""


class BoxShape(NamedTuple):
    """The box, and the window that is centred in it."""

    channels: int
    rows: int
    columns: int
    window: tuple[int, int]


@triton.jit
@no_type_check
def _fill(
    obs_ptr, norm_ptr, scratch_ptr, box_ptr, count, rounds, programs, M, width, channels, window_rows, window_columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GLOBAL: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m, lane = tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    scratch = scratch_ptr + tl.program_id(0) * width
    for number in range(rounds):
        row = number * programs + tl.program_id(0)
        tokens, outputs = tl.where(row < count, M, 0), tl.where(row < count, width, 0)
        for start in range(0, width, BLOCK):
            tl.store(scratch + start + lane, tl.zeros((BLOCK,), tl.float32), mask=start + lane < width)
        tl.debug_barrier()
        token, is_token = obs_ptr + (row.to(tl.int64) * M + m) * 3, m < tokens
        location = tl.load(token, mask=is_token, other=255).to(tl.int32)
        feature = tl.load(token + 1, mask=is_token, other=255).to(tl.int32)
        value = tl.load(token + 2, mask=is_token, other=0).to(tl.float32)
        r, c = location >> 4, location & 15
        is_global = location == GLOBAL
        inside = is_token & (is_global | ((r < window_rows) & (c < window_columns))) & (feature < channels)
        cell = (r + (ROWS - window_rows) // 2) * COLUMNS + c + (COLUMNS - window_columns) // 2
        cell = tl.where(is_global, (ROWS // 2) * COLUMNS + COLUMNS // 2, cell)
        norm = tl.load(norm_ptr + feature, mask=inside, other=1.0)
        tl.atomic_max(scratch + feature * (ROWS * COLUMNS) + cell, tl.div_rn(value, norm), mask=inside)
        tl.debug_barrier()
        box = box_ptr + row.to(tl.int64) * width
        for start in range(0, width, BLOCK):
            # Atomics are not in the first level of the cache.
            x = tl.load(scratch + start + lane, mask=start + lane < width, cache_modifier=".cg")
            tl.store(box + start + lane, x.to(box_ptr.dtype.element_ty), mask=start + lane < outputs)
        tl.debug_barrier()


def fill_boxes(
    obs: UInt8[Tensor, "N M 3"], norm: Float[Tensor, " channels"], shape: BoxShape, width: int, dtype: torch.dtype
) -> Float[Tensor, "N width"]:
    """Return boxes as rows of `width` numbers; those after the last cell are 0."""
    count, M = obs.shape[:2]
    processors = 1 if obs.is_cpu else torch.cuda.get_device_properties(obs.device).multi_processor_count
    programs = max(1, min(count, PROGRAMS * processors))
    scratch = torch.empty(programs, width, device=obs.device)
    boxes = torch.empty(count, width, dtype=dtype, device=obs.device)
    rounds = -(-count // programs)
    inputs = (obs.contiguous(), norm, scratch, boxes, count, rounds, programs, M, width, shape.channels, *shape.window)
    _fill[(programs,)](
        *inputs,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        GLOBAL=GLOBAL,
        TOKENS=triton.next_power_of_2(max(M, 1)),
        BLOCK=512,
    )
    return boxes
