"""LSTM over whole segments with clears inside, in one launch each way.

A program has `ROWS` rows and `UNITS` of the hidden units for the whole segment. If it has all units
(`SPLITS` = 1), the state stays in its registers. Otherwise the programs of a group exchange hidden states
(forward) and gate gradients (backward) through global memory at every step. Each keeps its weights on chip
(`STAGES` = 0) or, for many rows, streams weights and exchanged values in `STAGES` pipeline stages. With
weights on chip, the forward pass polls the exchanged values until all are written; otherwise programs
synchronize by a counter. Without `COOPERATIVE` a launch does one step and no program waits.

Gates are i f g o. Bit 0 of a step's code: clear; bit 1: invalid.
"""

from typing import no_type_check

import triton
import triton.language as tl

from holdfast.memory.kernels.triton_utils import (
    add_recurrent_grad,
    arrive,
    canonical_nan,
    load_gates,
    load_weights,
    load_when_written,
    place,
    sigmoid,
    store_gates,
    tanh,
    wait,
)


@triton.jit
@no_type_check
def forward(
    x, w, h_in, c_in, code, y, h_prev, cells, gates, h_out, c_out, counters, B, T, begin, end, row0,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr,
    SAVE: tl.constexpr, COOPERATIVE: tl.constexpr, APPROX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run steps `begin` to `end`; `SAVE`: store what the backward pass needs."""
    group, rows, units, row_mask, mask, state_at, step = place(row0, B, T, H, ROWS, UNITS, SPLITS)
    dtype = w.dtype.element_ty
    if STAGES == 0:
        w_tiles = load_weights(w, units, 1, H, H, 4, CHUNK, CHUNKS)

    flags = tl.load(code + step + begin, mask=rows < B, other=0)
    h = tl.load(h_in + state_at, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(c_in + state_at, mask=mask, other=0.0).to(tl.float32)
    h = tl.where((flags & 1)[:, None] != 0, 0.0, canonical_nan(h))
    if SAVE or SPLITS > 1:
        tl.store(h_prev + (step + begin)[:, None] * H + units[None, :], h.to(dtype), mask=mask)
    if STAGES > 0 and COOPERATIVE:
        arrive(counters + group)
    if STAGES == 0:
        next_i, next_f, next_g, next_o = load_gates(x, step + begin, units, mask, H, 4)
    for t in range(begin, end):
        next_t = tl.minimum(t + 1, T - 1)
        next_flags = tl.load(code + step + next_t, mask=rows < B, other=0)
        if STAGES == 0:
            # Prefetch the next step's inputs before computing this one.
            x_i, x_f, x_g, x_o = next_i, next_f, next_g, next_o
            next_i, next_f, next_g, next_o = load_gates(x, step + next_t, units, mask, H, 4)
        else:
            x_i, x_f, x_g, x_o = load_gates(x, step + t, units, mask, H, 4)
        i, f, g, o = x_i.to(tl.float32), x_f.to(tl.float32), x_g.to(tl.float32), x_o.to(tl.float32)
        if STAGES == 0:
            if SPLITS == 1:
                h_tiles = (h.to(dtype),)
            else:
                h_tiles = load_when_written(h_prev + (step + t) * H, row_mask, H, CHUNK, CHUNKS, COOPERATIVE)
            for chunk in tl.static_range(CHUNKS):
                i = tl.dot(h_tiles[chunk], w_tiles[chunk], i, input_precision=PRECISION)
                f = tl.dot(h_tiles[chunk], w_tiles[CHUNKS + chunk], f, input_precision=PRECISION)
                g = tl.dot(h_tiles[chunk], w_tiles[2 * CHUNKS + chunk], g, input_precision=PRECISION)
                o = tl.dot(h_tiles[chunk], w_tiles[3 * CHUNKS + chunk], o, input_precision=PRECISION)
        else:
            if COOPERATIVE:
                wait(counters + group, SPLITS * (t - begin + 1))
            for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
                inputs = chunk * CHUNK + tl.arange(0, CHUNK)
                at = h_prev + (step + t)[:, None] * H + inputs[None, :]
                h_tile = tl.load(at, mask=row_mask & (inputs < H)[None, :], other=0.0)
                w_mask = (inputs < H)[:, None] & (units < H)[None, :]
                at = w + inputs[:, None] + units[None, :] * H
                i = tl.dot(h_tile, tl.load(at, mask=w_mask, other=0.0), i, input_precision=PRECISION)
                f = tl.dot(h_tile, tl.load(at + H * H, mask=w_mask, other=0.0), f, input_precision=PRECISION)
                g = tl.dot(h_tile, tl.load(at + 2 * H * H, mask=w_mask, other=0.0), g, input_precision=PRECISION)
                o = tl.dot(h_tile, tl.load(at + 3 * H * H, mask=w_mask, other=0.0), o, input_precision=PRECISION)
        i, f, g, o = sigmoid(i, APPROX), sigmoid(f, APPROX), tanh(g, APPROX), sigmoid(o, APPROX)
        valid = (flags & 2)[:, None] == 0
        c = tl.where((flags & 1)[:, None] != 0, 0.0, c)
        c = tl.where(valid, f * c + i * g, c)
        h_new = o * tanh(c, APPROX)
        h_after = tl.where(valid, h_new, h)
        h = tl.where((next_flags & 1)[:, None] != 0, 0.0, h_after)
        at = (step + t)[:, None] * H + units[None, :]
        if SAVE or SPLITS > 1:
            if t + 1 < T:
                tl.store(h_prev + at + H, h.to(dtype), mask=mask)
        if STAGES > 0 and COOPERATIVE:
            arrive(counters + group)
        tl.store(y + at, tl.where(valid, h_new, 0.0).to(dtype), mask=mask)
        if SAVE:
            tl.store(cells + at, c.to(cells.dtype.element_ty), mask=mask)
            store_gates(gates, (i, f, g, o), step + t, units, mask, H)
        if t + 1 == end:
            tl.store(h_out + state_at, h_after, mask=mask)
        flags = next_flags
    tl.store(c_out + state_at, c, mask=mask)


@triton.jit
@no_type_check
def backward(
    w, c_in, code, cells, gates, dy, dh_out, dc_out, dgates, dh_in, dc_in, counters, B, T, begin, end, row0,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr,
    GRAD_OUT: tl.constexpr, ENTRY_GRAD: tl.constexpr, COOPERATIVE: tl.constexpr,
    APPROX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run steps `end - 1` down to `begin`.

    `GRAD_OUT`: `dh_out` and `dc_out` hold the gradient from after step `end`. `ENTRY_GRAD`: write `dh_in` and `dc_in`.
    Split layers add a step's recurrent gradient when the next step begins, from the gate gradients of all programs.
    """
    group, rows, units, row_mask, mask, state_at, step = place(row0, B, T, H, ROWS, UNITS, SPLITS)
    dtype = w.dtype.element_ty
    w_tiles = load_weights(w, units, H, 1, H, 4, CHUNK, CHUNKS) if STAGES == 0 else ()

    dh, dc = tl.zeros((ROWS, UNITS), tl.float32), tl.zeros((ROWS, UNITS), tl.float32)
    if GRAD_OUT:
        dh += tl.load(dh_out + state_at, mask=mask, other=0.0)
        dc += tl.load(dc_out + state_at, mask=mask, other=0.0)
    last = tl.maximum(end - 1, 0)
    if STAGES == 0:
        next_i, next_f, next_g, next_o, next_d_y, next_c_prev = _load_saved(
            gates, dy, cells, c_in, step, last, state_at, units, mask, H
        )
    earlier_flags = tl.load(code + step + last, mask=rows < B, other=0)
    for back in range(end - begin):
        t = end - 1 - back
        flags = earlier_flags
        earlier_flags = tl.load(code + step + tl.maximum(t - 1, 0), mask=rows < B, other=0)
        if STAGES == 0:
            # Prefetch the previous step's values before computing this one.
            i, f, g, o = next_i, next_f, next_g, next_o
            d_y, c_prev = next_d_y, next_c_prev
            previous_t = tl.maximum(t - 1, 0)
            next_i, next_f, next_g, next_o, next_d_y, next_c_prev = _load_saved(
                gates, dy, cells, c_in, step, previous_t, state_at, units, mask, H
            )
        if SPLITS > 1:
            if t + 1 < T:
                later_flags = tl.load(code + step + t + 1, mask=rows < B, other=0)
                if COOPERATIVE:
                    wait(counters + group, SPLITS * back)
                dh = add_recurrent_grad(
                    dgates, dh, later_flags, step + t + 1, row_mask, w, units, w_tiles, 4, 0,
                    H, CHUNK, CHUNKS, STAGES, PRECISION,
                )  # fmt: skip
        if STAGES > 0:
            i, f, g, o, d_y, c_prev = _load_saved(gates, dy, cells, c_in, step, t, state_at, units, mask, H)
        valid = (flags & 2)[:, None] == 0
        cleared = (flags & 1)[:, None] != 0
        i, f, g, o = i.to(tl.float32), f.to(tl.float32), g.to(tl.float32), o.to(tl.float32)
        c_read = tl.where(cleared, 0.0, c_prev)
        tanh_c = tanh(f * c_read + i * g, APPROX)
        dh = tl.where(valid, dh + d_y.to(tl.float32), dh)
        dc_now = dc + dh * o * (1.0 - tanh_c * tanh_c)
        d_i = tl.where(valid, dc_now * g * i * (1.0 - i), 0.0).to(dtype)
        d_f = tl.where(valid, dc_now * c_read * f * (1.0 - f), 0.0).to(dtype)
        d_g = tl.where(valid, dc_now * i * (1.0 - g * g), 0.0).to(dtype)
        d_o = tl.where(valid, dh * tanh_c * o * (1.0 - o), 0.0).to(dtype)
        store_gates(dgates, (d_i, d_f, d_g, d_o), step + t, units, mask, H)
        if SPLITS > 1 and COOPERATIVE:
            arrive(counters + group)
        # At invalid steps these gradients are 0, and the gradient of later steps passes through.
        dh = tl.where(valid, 0.0, dh)
        if SPLITS == 1:
            # Separate accumulators: chained products wait for each other.
            grad_i = tl.dot(d_i, w_tiles[0], input_precision=PRECISION)
            grad_f = tl.dot(d_f, w_tiles[1], input_precision=PRECISION)
            grad_g = tl.dot(d_g, w_tiles[2], input_precision=PRECISION)
            grad_o = tl.dot(d_o, w_tiles[3], input_precision=PRECISION)
            dh += (grad_i + grad_f) + (grad_g + grad_o)
            dh = tl.where(cleared, 0.0, dh)
        dc = tl.where(cleared, 0.0, tl.where(valid, dc_now * f, dc))
    if ENTRY_GRAD and SPLITS > 1:
        if begin == 0:
            if COOPERATIVE:
                wait(counters + group, SPLITS * (end - begin))
            if COOPERATIVE or end == 0:
                later_flags = tl.load(code + step, mask=rows < B, other=0)
                dh = add_recurrent_grad(
                    dgates, dh, later_flags, step, row_mask, w, units, w_tiles, 4, 0,
                    H, CHUNK, CHUNKS, STAGES, PRECISION,
                )  # fmt: skip
    if ENTRY_GRAD or not COOPERATIVE:
        tl.store(dh_in + state_at, dh, mask=mask)
        tl.store(dc_in + state_at, dc, mask=mask)


@triton.jit
@no_type_check
def _load_saved(gates, dy, cells, c_in, step, t, state_at, units, mask, H: tl.constexpr):
    """Load what the forward pass saved of a step, and the gradient of its output."""
    i, f, g, o = load_gates(gates, step + t, units, mask, H, 4)
    at = (step + t)[:, None] * H + units[None, :]
    d_y = tl.load(dy + at, mask=mask, other=0.0)
    if t == 0:
        c_prev = tl.load(c_in + state_at, mask=mask, other=0.0).to(tl.float32)
    else:
        c_prev = tl.load(cells + at - H, mask=mask, other=0.0)
    return i, f, g, o, d_y, c_prev
