"""GRU over whole segments with clears inside, in one launch each way; lstm.py describes the splitting.

Gates are r z n. Saved for the backward pass: r, z, n and n_h, the hidden state's contribution to n.
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
    x, w, bias, h_in, code, y, h_prev, gates, h_out, counters, B, T, begin, end, row0,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr,
    SAVE: tl.constexpr, COOPERATIVE: tl.constexpr, APPROX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run steps `begin` to `end`; `SAVE`: store what the backward pass needs."""
    group, rows, units, row_mask, mask, state_at, step = place(row0, B, T, H, ROWS, UNITS, SPLITS)
    dtype = w.dtype.element_ty
    if STAGES == 0:
        w_tiles = load_weights(w, units, 1, H, H, 3, CHUNK, CHUNKS)
    b_n = tl.load(bias + units, mask=units < H, other=0.0).to(tl.float32)[None, :]

    flags = tl.load(code + step + begin, mask=rows < B, other=0)
    h = tl.load(h_in + state_at, mask=mask, other=0.0).to(tl.float32)
    h = tl.where((flags & 1)[:, None] != 0, 0.0, canonical_nan(h))
    if SAVE or SPLITS > 1:
        tl.store(h_prev + (step + begin)[:, None] * H + units[None, :], h.to(dtype), mask=mask)
    if STAGES > 0 and COOPERATIVE:
        arrive(counters + group)
    if STAGES == 0:
        next_r, next_z, next_n = load_gates(x, step + begin, units, mask, H, 3)
    for t in range(begin, end):
        next_t = tl.minimum(t + 1, T - 1)
        next_flags = tl.load(code + step + next_t, mask=rows < B, other=0)
        n_h = tl.zeros((ROWS, UNITS), tl.float32) + b_n
        if STAGES == 0:
            # Prefetch the next step's inputs before computing this one.
            x_r, x_z, x_n = next_r, next_z, next_n
            next_r, next_z, next_n = load_gates(x, step + next_t, units, mask, H, 3)
        else:
            x_r, x_z, x_n = load_gates(x, step + t, units, mask, H, 3)
        r, z, n = x_r.to(tl.float32), x_z.to(tl.float32), x_n.to(tl.float32)
        if STAGES == 0:
            if SPLITS == 1:
                h_tiles = (h.to(dtype),)
            else:
                h_tiles = load_when_written(h_prev + (step + t) * H, row_mask, H, CHUNK, CHUNKS, COOPERATIVE)
            for chunk in tl.static_range(CHUNKS):
                r = tl.dot(h_tiles[chunk], w_tiles[chunk], r, input_precision=PRECISION)
                z = tl.dot(h_tiles[chunk], w_tiles[CHUNKS + chunk], z, input_precision=PRECISION)
                n_h = tl.dot(h_tiles[chunk], w_tiles[2 * CHUNKS + chunk], n_h, input_precision=PRECISION)
        else:
            if COOPERATIVE:
                wait(counters + group, SPLITS * (t - begin + 1))
            for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
                inputs = chunk * CHUNK + tl.arange(0, CHUNK)
                at = h_prev + (step + t)[:, None] * H + inputs[None, :]
                h_tile = tl.load(at, mask=row_mask & (inputs < H)[None, :], other=0.0)
                w_mask = (inputs < H)[:, None] & (units < H)[None, :]
                at = w + inputs[:, None] + units[None, :] * H
                r = tl.dot(h_tile, tl.load(at, mask=w_mask, other=0.0), r, input_precision=PRECISION)
                z = tl.dot(h_tile, tl.load(at + H * H, mask=w_mask, other=0.0), z, input_precision=PRECISION)
                w_tile = tl.load(at + 2 * H * H, mask=w_mask, other=0.0)
                n_h = tl.dot(h_tile, w_tile, n_h, input_precision=PRECISION)
        r, z = sigmoid(r, APPROX), sigmoid(z, APPROX)
        n = tanh(n + r * n_h, APPROX)
        valid = (flags & 2)[:, None] == 0
        h_new = n + z * (h - n)
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
            store_gates(gates, (r, z, n, n_h), step + t, units, mask, H)
        if t + 1 == end:
            tl.store(h_out + state_at, h_after, mask=mask)
        flags = next_flags


@triton.jit
@no_type_check
def backward(
    w, code, h_prev, gates, dy, dh_out, dgates, dh_in, counters, B, T, begin, end, row0,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr,
    GRAD_OUT: tl.constexpr, ENTRY_GRAD: tl.constexpr, COOPERATIVE: tl.constexpr,
    APPROX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run steps `end - 1` down to `begin`, as in the LSTM.

    Gradients of a step are in the order n_h, r, z, n: the first three are those of the recurrent weights,
    the last three those of the input.
    """
    group, rows, units, row_mask, mask, state_at, step = place(row0, B, T, H, ROWS, UNITS, SPLITS)
    dtype = w.dtype.element_ty
    w_tiles = load_weights(w, units, H, 1, H, 3, CHUNK, CHUNKS) if STAGES == 0 else ()

    dh = tl.zeros((ROWS, UNITS), tl.float32)
    if GRAD_OUT:
        dh += tl.load(dh_out + state_at, mask=mask, other=0.0)
    last = tl.maximum(end - 1, 0)
    if STAGES == 0:
        next_r, next_z, next_n, next_n_h, next_d_y, next_h = _load_saved(gates, dy, h_prev, step + last, units, mask, H)
    earlier_flags = tl.load(code + step + last, mask=rows < B, other=0)
    for back in range(end - begin):
        t = end - 1 - back
        flags = earlier_flags
        earlier_flags = tl.load(code + step + tl.maximum(t - 1, 0), mask=rows < B, other=0)
        if STAGES == 0:
            # Prefetch the previous step's values before computing this one.
            r, z, n, n_h = next_r, next_z, next_n, next_n_h
            d_y, h = next_d_y, next_h
            previous_t = tl.maximum(t - 1, 0)
            next_r, next_z, next_n, next_n_h, next_d_y, next_h = _load_saved(
                gates, dy, h_prev, step + previous_t, units, mask, H
            )
        if SPLITS > 1:
            if t + 1 < T:
                later_flags = tl.load(code + step + t + 1, mask=rows < B, other=0)
                if COOPERATIVE:
                    wait(counters + group, SPLITS * back)
                dh = add_recurrent_grad(
                    dgates, dh, later_flags, step + t + 1, row_mask, w, units, w_tiles, 3, 2,
                    H, CHUNK, CHUNKS, STAGES, PRECISION,
                )  # fmt: skip
        if STAGES > 0:
            r, z, n, n_h, d_y, h = _load_saved(gates, dy, h_prev, step + t, units, mask, H)
        valid = (flags & 2)[:, None] == 0
        cleared = (flags & 1)[:, None] != 0
        r, z, n = r.to(tl.float32), z.to(tl.float32), n.to(tl.float32)
        dh = tl.where(valid, dh + d_y.to(tl.float32), dh)
        d_n = tl.where(valid, dh * (1.0 - z) * (1.0 - n * n), 0.0)
        d_z = tl.where(valid, dh * (h.to(tl.float32) - n) * z * (1.0 - z), 0.0).to(dtype)
        d_r = tl.where(valid, d_n * n_h.to(tl.float32) * r * (1.0 - r), 0.0).to(dtype)
        d_n_h = tl.where(valid, d_n * r, 0.0).to(dtype)
        store_gates(dgates, (d_n_h, d_r, d_z, d_n), step + t, units, mask, H)
        if SPLITS > 1 and COOPERATIVE:
            arrive(counters + group)
        dh = tl.where(valid, dh * z, dh)
        if SPLITS == 1:
            # Separate accumulators: chained products wait for each other.
            grad_r = tl.dot(d_r, w_tiles[0], input_precision=PRECISION)
            grad_z = tl.dot(d_z, w_tiles[1], input_precision=PRECISION)
            grad_n = tl.dot(d_n_h, w_tiles[2], input_precision=PRECISION)
            dh += (grad_r + grad_z) + grad_n
            dh = tl.where(cleared, 0.0, dh)
    if ENTRY_GRAD and SPLITS > 1:
        if begin == 0:
            if COOPERATIVE:
                wait(counters + group, SPLITS * (end - begin))
            if COOPERATIVE or end == 0:
                later_flags = tl.load(code + step, mask=rows < B, other=0)
                dh = add_recurrent_grad(
                    dgates, dh, later_flags, step, row_mask, w, units, w_tiles, 3, 2,
                    H, CHUNK, CHUNKS, STAGES, PRECISION,
                )  # fmt: skip
    if ENTRY_GRAD or not COOPERATIVE:
        tl.store(dh_in + state_at, dh, mask=mask)


@triton.jit
@no_type_check
def _load_saved(gates, dy, h_prev, at, units, mask, H: tl.constexpr):
    """Load what the forward pass saved of a step, and the gradient of its output."""
    r, z, n, n_h = load_gates(gates, at, units, mask, H, 4)
    d_y = tl.load(dy + at[:, None] * H + units[None, :], mask=mask, other=0.0)
    h = tl.load(h_prev + at[:, None] * H + units[None, :], mask=mask, other=0.0)
    return r, z, n, n_h, d_y, h
