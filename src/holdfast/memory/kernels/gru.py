"""The GRU over whole segments, clears inside, in one launch each way; how it is split is told in lstm.py.

Gates are r z n. Kept for the backward pass are r, z, n and what the hidden state brings to n.
"""

from typing import no_type_check

import triton
import triton.language as tl

from holdfast.memory.kernels.parts import arrive, handed, piece, sigmoid, tame, tanh, tiles, wait


@triton.jit
@no_type_check
def forward(
    x, w, bias, h_in, code, y, entered, gates, h_out, counters, B, T, begin, end, row0,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr,
    KEEP: tl.constexpr, TOGETHER: tl.constexpr, APPROX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run steps `begin` to `end`; `KEEP`: store what the backward pass needs."""
    group = tl.program_id(0) // PARTS
    rows = row0 + group * ROWS + tl.arange(0, ROWS)
    units = (tl.program_id(0) % PARTS) * UNITS + tl.arange(0, UNITS)
    dtype = w.dtype.element_ty
    there = (rows < B)[:, None]
    here = there & (units < H)[None, :]
    mine = rows.to(tl.int64)[:, None] * H + units[None, :]
    step = rows.to(tl.int64) * T
    if STAGES == 0:
        w_tiles = tiles(w, units, 1, H, H, 3, CHUNK, CHUNKS)
    b_n = tl.load(bias + units, mask=units < H, other=0.0).to(tl.float32)[None, :]

    does = tl.load(code + step + begin, mask=rows < B, other=0)
    h = tl.load(h_in + mine, mask=here, other=0.0).to(tl.float32)
    h = tl.where((does & 1)[:, None] != 0, 0.0, tame(h))
    if KEEP or PARTS > 1:
        tl.store(entered + (step + begin)[:, None] * H + units[None, :], h.to(dtype), mask=here)
    if STAGES > 0 and TOGETHER:
        arrive(counters + group)
    if STAGES == 0:
        next_r, next_z, next_n = _inputs(x, step + begin, units, here, H)
    for t in range(begin, end):
        later = tl.minimum(t + 1, T - 1)
        will = tl.load(code + step + later, mask=rows < B, other=0)
        brought = tl.zeros((ROWS, UNITS), tl.float32) + b_n
        if STAGES == 0:
            # What the next step reads is asked for before this one computes.
            x_r, x_z, x_n = next_r, next_z, next_n
            next_r, next_z, next_n = _inputs(x, step + later, units, here, H)
        else:
            x_r, x_z, x_n = _inputs(x, step + t, units, here, H)
        r, z, n = x_r.to(tl.float32), x_z.to(tl.float32), x_n.to(tl.float32)
        if PARTS == 1:
            read = h.to(dtype)
            r = tl.dot(read, w_tiles[0], r, input_precision=PRECISION)
            z = tl.dot(read, w_tiles[1], z, input_precision=PRECISION)
            brought = tl.dot(read, w_tiles[2], brought, input_precision=PRECISION)
        elif STAGES == 0:
            now = handed(entered + (step + t) * H, there, H, CHUNK, CHUNKS, TOGETHER)
            for chunk in tl.static_range(CHUNKS):
                r = tl.dot(now[chunk], w_tiles[chunk], r, input_precision=PRECISION)
                z = tl.dot(now[chunk], w_tiles[CHUNKS + chunk], z, input_precision=PRECISION)
                brought = tl.dot(now[chunk], w_tiles[2 * CHUNKS + chunk], brought, input_precision=PRECISION)
        else:
            if TOGETHER:
                wait(counters + group, PARTS * (t - begin + 1))
            for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
                inputs = chunk * CHUNK + tl.arange(0, CHUNK)
                at = entered + (step + t)[:, None] * H + inputs[None, :]
                now = tl.load(at, mask=there & (inputs < H)[None, :], other=0.0)
                fits = (inputs < H)[:, None] & (units < H)[None, :]
                at = w + inputs[:, None] + units[None, :] * H
                r = tl.dot(now, tl.load(at, mask=fits, other=0.0), r, input_precision=PRECISION)
                z = tl.dot(now, tl.load(at + H * H, mask=fits, other=0.0), z, input_precision=PRECISION)
                tile = tl.load(at + 2 * H * H, mask=fits, other=0.0)
                brought = tl.dot(now, tile, brought, input_precision=PRECISION)
        r, z = sigmoid(r, APPROX), sigmoid(z, APPROX)
        n = tanh(n + r * brought, APPROX)
        acts = (does & 2)[:, None] == 0
        said = n + z * (h - n)
        left = tl.where(acts, said, h)
        h = tl.where((will & 1)[:, None] != 0, 0.0, left)
        at = (step + t)[:, None] * H + units[None, :]
        if KEEP or PARTS > 1:
            if t + 1 < T:
                tl.store(entered + at + H, h.to(dtype), mask=here)
        if STAGES > 0 and TOGETHER:
            arrive(counters + group)
        tl.store(y + at, tl.where(acts, said, 0.0).to(dtype), mask=here)
        if KEEP:
            gates_at = gates + (step + t)[:, None] * (4 * H) + units[None, :]
            tl.store(gates_at, r.to(dtype), mask=here)
            tl.store(gates_at + H, z.to(dtype), mask=here)
            tl.store(gates_at + 2 * H, n.to(dtype), mask=here)
            tl.store(gates_at + 3 * H, brought.to(dtype), mask=here)
        if t + 1 == end:
            tl.store(h_out + mine, left, mask=here)
        does = will


@triton.jit
@no_type_check
def _inputs(x, at, units, here, H: tl.constexpr):
    """Load what the input brings to the gates of a step."""
    x_at = x + at[:, None] * (3 * H) + units[None, :]
    r = tl.load(x_at, mask=here, other=0.0)
    z = tl.load(x_at + H, mask=here, other=0.0)
    n = tl.load(x_at + 2 * H, mask=here, other=0.0)
    return r, z, n


@triton.jit
@no_type_check
def backward(
    w, code, entered, gates, dy, dh_out, dgates, dh_in, counters, B, T, begin, end, row0,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr, LATER: tl.constexpr, ENTRY: tl.constexpr,
    TOGETHER: tl.constexpr, APPROX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run steps `end - 1` down to `begin`, as the LSTM's.

    The gradients of a step are, in this order, those of what the hidden state brings to n, and of what
    the input brings to r, z and n: so that the first three and the last three are a matrix each.
    """
    group = tl.program_id(0) // PARTS
    rows = row0 + group * ROWS + tl.arange(0, ROWS)
    units = (tl.program_id(0) % PARTS) * UNITS + tl.arange(0, UNITS)
    dtype = w.dtype.element_ty
    there = (rows < B)[:, None]
    here = there & (units < H)[None, :]
    mine = rows.to(tl.int64)[:, None] * H + units[None, :]
    step = rows.to(tl.int64) * T
    if STAGES == 0:
        w_tiles = tiles(w, units, H, 1, H, 3, CHUNK, CHUNKS)
    else:
        w_tiles = ()

    dh = tl.zeros((ROWS, UNITS), tl.float32)
    if LATER:
        dh += tl.load(dh_out + mine, mask=here, other=0.0)
    last = tl.maximum(end - 1, 0)
    if STAGES == 0:
        next_r, next_z, next_n, next_brought, next_pulled, next_h = _kept(
            gates, dy, entered, step + last, units, here, H
        )
    next_does = tl.load(code + step + last, mask=rows < B, other=0)
    for back in range(end - begin):
        t = end - 1 - back
        does = next_does
        next_does = tl.load(code + step + tl.maximum(t - 1, 0), mask=rows < B, other=0)
        if STAGES == 0:
            # What the step before reads is asked for before this one computes.
            r, z, n, brought = next_r, next_z, next_n, next_brought
            pulled, h = next_pulled, next_h
            sooner = tl.maximum(t - 1, 0)
            next_r, next_z, next_n, next_brought, next_pulled, next_h = _kept(
                gates, dy, entered, step + sooner, units, here, H
            )
        if PARTS > 1:
            if t + 1 < T:
                was = tl.load(code + step + t + 1, mask=rows < B, other=0)
                if TOGETHER:
                    wait(counters + group, PARTS * back)
                dh = _finish(
                    dgates, dh, was, step + t + 1, there, w, units, w_tiles,
                    H, CHUNK, CHUNKS, STAGES, PRECISION,
                )  # fmt: skip
        if STAGES > 0:
            r, z, n, brought, pulled, h = _kept(gates, dy, entered, step + t, units, here, H)
        acts = (does & 2)[:, None] == 0
        clears = (does & 1)[:, None] != 0
        r, z, n = r.to(tl.float32), z.to(tl.float32), n.to(tl.float32)
        dh = tl.where(acts, dh + pulled.to(tl.float32), dh)
        d_n = tl.where(acts, dh * (1.0 - z) * (1.0 - n * n), 0.0)
        d_z = tl.where(acts, dh * (h.to(tl.float32) - n) * z * (1.0 - z), 0.0).to(dtype)
        d_r = tl.where(acts, d_n * brought.to(tl.float32) * r * (1.0 - r), 0.0).to(dtype)
        d_brought = tl.where(acts, d_n * r, 0.0).to(dtype)
        dgates_at = dgates + (step + t)[:, None] * (4 * H) + units[None, :]
        tl.store(dgates_at, d_brought, mask=here)
        tl.store(dgates_at + H, d_r, mask=here)
        tl.store(dgates_at + 2 * H, d_z, mask=here)
        tl.store(dgates_at + 3 * H, d_n.to(dtype), mask=here)
        if PARTS > 1 and TOGETHER:
            arrive(counters + group)
        dh = tl.where(acts, dh * z, dh)
        if PARTS == 1:
            # Sums of their own: products that wait for each other's sum are slow.
            pull_r = tl.dot(d_r, w_tiles[0], input_precision=PRECISION)
            pull_z = tl.dot(d_z, w_tiles[1], input_precision=PRECISION)
            pull_n = tl.dot(d_brought, w_tiles[2], input_precision=PRECISION)
            dh += (pull_r + pull_z) + pull_n
            dh = tl.where(clears, 0.0, dh)
    if ENTRY and PARTS > 1:
        if begin == 0:
            if TOGETHER:
                wait(counters + group, PARTS * (end - begin))
            if TOGETHER or end == 0:
                was = tl.load(code + step, mask=rows < B, other=0)
                dh = _finish(
                    dgates, dh, was, step, there, w, units, w_tiles,
                    H, CHUNK, CHUNKS, STAGES, PRECISION,
                )  # fmt: skip
    if ENTRY or not TOGETHER:
        tl.store(dh_in + mine, dh, mask=here)


@triton.jit
@no_type_check
def _kept(gates, dy, entered, at, units, here, H: tl.constexpr):
    """Load what the forward pass kept of a step, and the pull on its output."""
    gates_at = gates + at[:, None] * (4 * H) + units[None, :]
    r = tl.load(gates_at, mask=here, other=0.0)
    z = tl.load(gates_at + H, mask=here, other=0.0)
    n = tl.load(gates_at + 2 * H, mask=here, other=0.0)
    brought = tl.load(gates_at + 3 * H, mask=here, other=0.0)
    pulled = tl.load(dy + at[:, None] * H + units[None, :], mask=here, other=0.0)
    h = tl.load(entered + at[:, None] * H + units[None, :], mask=here, other=0.0)
    return r, z, n, brought, pulled, h


@triton.jit
@no_type_check
def _finish(
    dgates, dh, was, step, there, w, units, w_tiles,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the pull on the hidden state that a step has read; gradients begin with n, weights with r."""
    at = dgates + step * (4 * H)
    if STAGES == 0:
        read = piece(at, there, 0, H, CHUNK)
        for gate in tl.static_range(3):
            # Sums of their own: products that wait for each other's sum are slow.
            pull = tl.zeros(dh.shape, tl.float32)
            for chunk in tl.static_range(CHUNKS):
                now = read
                if gate * CHUNKS + chunk + 1 < 3 * CHUNKS:
                    following = gate * CHUNKS + chunk + 1
                    read = piece(at + following // CHUNKS * H, there, following % CHUNKS, H, CHUNK)
                pull = tl.dot(now, w_tiles[(gate + 2) % 3 * CHUNKS + chunk], pull, input_precision=PRECISION)
            dh += pull
    else:
        for part in tl.range(0, 3 * CHUNKS, num_stages=STAGES):
            gate = part // CHUNKS
            inputs = (part % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
            now = tl.load(
                at[:, None] + (gate * H + inputs)[None, :], mask=there & (inputs < H)[None, :], other=0.0
            )
            fits = (inputs < H)[:, None] & (units < H)[None, :]
            from_row = ((gate + 2) % 3) * H + inputs
            tile = tl.load(w + from_row[:, None] * H + units[None, :], mask=fits, other=0.0)
            dh = tl.dot(now, tile, dh, input_precision=PRECISION)
    return tl.where((was & 1)[:, None] != 0, 0.0, dh)
