"""The LSTM over whole segments, clears inside, in one launch each way.

A program has `ROWS` rows and `UNITS` of the hidden units for the whole segment. With one program for all
units (`PARTS` = 1) what is remembered never leaves it. With several, they hand each other the hidden
state (forward) and the gates' gradients (backward) through memory, step by step. Their parts of the
weights stay on the chip; or, for many rows, weights and what is handed over are streamed in `STAGES`
(0: they stay). Forward, with weights that stay, a program reads again until all is written; otherwise
programs count each other in. Without `TOGETHER` a launch does one step and nobody waits.

Gates are i f g o. A step's code has bit 0 set if it clears, bit 1 if nobody acts.
"""

from typing import no_type_check

import triton
import triton.language as tl

from holdfast.memory.kernels.parts import arrive, handed, piece, sigmoid, tame, tanh, tiles, wait


@triton.jit
@no_type_check
def forward(
    x, w, h_in, c_in, code, y, entered, cells, gates, h_out, c_out, counters, B, T, begin, end, row0,
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
        w_tiles = tiles(w, units, 1, H, H, 4, CHUNK, CHUNKS)

    does = tl.load(code + step + begin, mask=rows < B, other=0)
    h = tl.load(h_in + mine, mask=here, other=0.0).to(tl.float32)
    c = tl.load(c_in + mine, mask=here, other=0.0).to(tl.float32)
    h = tl.where((does & 1)[:, None] != 0, 0.0, tame(h))
    if KEEP or PARTS > 1:
        tl.store(entered + (step + begin)[:, None] * H + units[None, :], h.to(dtype), mask=here)
    if STAGES > 0 and TOGETHER:
        arrive(counters + group)
    if STAGES == 0:
        next_i, next_f, next_g, next_o = _inputs(x, step + begin, units, here, H)
    for t in range(begin, end):
        later = tl.minimum(t + 1, T - 1)
        will = tl.load(code + step + later, mask=rows < B, other=0)
        if STAGES == 0:
            # What the next step reads is asked for before this one computes.
            x_i, x_f, x_g, x_o = next_i, next_f, next_g, next_o
            next_i, next_f, next_g, next_o = _inputs(x, step + later, units, here, H)
        else:
            x_i, x_f, x_g, x_o = _inputs(x, step + t, units, here, H)
        i, f, g, o = x_i.to(tl.float32), x_f.to(tl.float32), x_g.to(tl.float32), x_o.to(tl.float32)
        if PARTS == 1:
            read = h.to(dtype)
            i = tl.dot(read, w_tiles[0], i, input_precision=PRECISION)
            f = tl.dot(read, w_tiles[1], f, input_precision=PRECISION)
            g = tl.dot(read, w_tiles[2], g, input_precision=PRECISION)
            o = tl.dot(read, w_tiles[3], o, input_precision=PRECISION)
        elif STAGES == 0:
            now = handed(entered + (step + t) * H, there, H, CHUNK, CHUNKS, TOGETHER)
            for chunk in tl.static_range(CHUNKS):
                i = tl.dot(now[chunk], w_tiles[chunk], i, input_precision=PRECISION)
                f = tl.dot(now[chunk], w_tiles[CHUNKS + chunk], f, input_precision=PRECISION)
                g = tl.dot(now[chunk], w_tiles[2 * CHUNKS + chunk], g, input_precision=PRECISION)
                o = tl.dot(now[chunk], w_tiles[3 * CHUNKS + chunk], o, input_precision=PRECISION)
        else:
            if TOGETHER:
                wait(counters + group, PARTS * (t - begin + 1))
            for chunk in tl.range(0, CHUNKS, num_stages=STAGES):
                inputs = chunk * CHUNK + tl.arange(0, CHUNK)
                at = entered + (step + t)[:, None] * H + inputs[None, :]
                now = tl.load(at, mask=there & (inputs < H)[None, :], other=0.0)
                fits = (inputs < H)[:, None] & (units < H)[None, :]
                at = w + inputs[:, None] + units[None, :] * H
                i = tl.dot(now, tl.load(at, mask=fits, other=0.0), i, input_precision=PRECISION)
                f = tl.dot(now, tl.load(at + H * H, mask=fits, other=0.0), f, input_precision=PRECISION)
                g = tl.dot(now, tl.load(at + 2 * H * H, mask=fits, other=0.0), g, input_precision=PRECISION)
                o = tl.dot(now, tl.load(at + 3 * H * H, mask=fits, other=0.0), o, input_precision=PRECISION)
        i, f, g, o = sigmoid(i, APPROX), sigmoid(f, APPROX), tanh(g, APPROX), sigmoid(o, APPROX)
        acts = (does & 2)[:, None] == 0
        c = tl.where((does & 1)[:, None] != 0, 0.0, c)
        c = tl.where(acts, f * c + i * g, c)
        said = o * tanh(c, APPROX)
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
            tl.store(cells + at, c.to(cells.dtype.element_ty), mask=here)
            gates_at = gates + (step + t)[:, None] * (4 * H) + units[None, :]
            tl.store(gates_at, i.to(dtype), mask=here)
            tl.store(gates_at + H, f.to(dtype), mask=here)
            tl.store(gates_at + 2 * H, g.to(dtype), mask=here)
            tl.store(gates_at + 3 * H, o.to(dtype), mask=here)
        if t + 1 == end:
            tl.store(h_out + mine, left, mask=here)
        does = will
    tl.store(c_out + mine, c, mask=here)


@triton.jit
@no_type_check
def _inputs(x, at, units, here, H: tl.constexpr):
    """Load what the input brings to the gates of a step."""
    x_at = x + at[:, None] * (4 * H) + units[None, :]
    i = tl.load(x_at, mask=here, other=0.0)
    f = tl.load(x_at + H, mask=here, other=0.0)
    g = tl.load(x_at + 2 * H, mask=here, other=0.0)
    o = tl.load(x_at + 3 * H, mask=here, other=0.0)
    return i, f, g, o


@triton.jit
@no_type_check
def backward(
    w, c_in, code, cells, gates, dy, dh_out, dc_out, dgates, dh_in, dc_in, counters, B, T, begin, end, row0,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, UNITS: tl.constexpr, PARTS: tl.constexpr, LATER: tl.constexpr, ENTRY: tl.constexpr,
    TOGETHER: tl.constexpr, APPROX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run steps `end - 1` down to `begin`.

    `LATER`: `dh_out` and `dc_out` come from what is after step `end`. `ENTRY`: `dh_in` and `dc_in` go to
    what is before step `begin`. Programs that split a layer finish a step's pull on the hidden state when
    the next one begins, from the gates' gradients that all of them have written.
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
        w_tiles = tiles(w, units, H, 1, H, 4, CHUNK, CHUNKS)
    else:
        w_tiles = ()

    dh, dc = tl.zeros((ROWS, UNITS), tl.float32), tl.zeros((ROWS, UNITS), tl.float32)
    if LATER:
        dh += tl.load(dh_out + mine, mask=here, other=0.0)
        dc += tl.load(dc_out + mine, mask=here, other=0.0)
    last = tl.maximum(end - 1, 0)
    if STAGES == 0:
        next_i, next_f, next_g, next_o, next_pulled, next_before = _kept(
            gates, dy, cells, c_in, step, last, mine, units, here, H
        )
    next_does = tl.load(code + step + last, mask=rows < B, other=0)
    for back in range(end - begin):
        t = end - 1 - back
        does = next_does
        next_does = tl.load(code + step + tl.maximum(t - 1, 0), mask=rows < B, other=0)
        if STAGES == 0:
            # What the step before reads is asked for before this one computes.
            i, f, g, o = next_i, next_f, next_g, next_o
            pulled, before = next_pulled, next_before
            sooner = tl.maximum(t - 1, 0)
            next_i, next_f, next_g, next_o, next_pulled, next_before = _kept(
                gates, dy, cells, c_in, step, sooner, mine, units, here, H
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
            i, f, g, o, pulled, before = _kept(gates, dy, cells, c_in, step, t, mine, units, here, H)
        acts = (does & 2)[:, None] == 0
        clears = (does & 1)[:, None] != 0
        i, f, g, o = i.to(tl.float32), f.to(tl.float32), g.to(tl.float32), o.to(tl.float32)
        c_before = tl.where(clears, 0.0, before)
        told = tanh(f * c_before + i * g, APPROX)
        dh = tl.where(acts, dh + pulled.to(tl.float32), dh)
        dc_now = dc + dh * o * (1.0 - told * told)
        d_i = tl.where(acts, dc_now * g * i * (1.0 - i), 0.0).to(dtype)
        d_f = tl.where(acts, dc_now * c_before * f * (1.0 - f), 0.0).to(dtype)
        d_g = tl.where(acts, dc_now * i * (1.0 - g * g), 0.0).to(dtype)
        d_o = tl.where(acts, dh * told * o * (1.0 - o), 0.0).to(dtype)
        dgates_at = dgates + (step + t)[:, None] * (4 * H) + units[None, :]
        tl.store(dgates_at, d_i, mask=here)
        tl.store(dgates_at + H, d_f, mask=here)
        tl.store(dgates_at + 2 * H, d_g, mask=here)
        tl.store(dgates_at + 3 * H, d_o, mask=here)
        if PARTS > 1 and TOGETHER:
            arrive(counters + group)
        # Where nobody acts all these gradients are 0, and what came from later steps goes on.
        dh = tl.where(acts, 0.0, dh)
        if PARTS == 1:
            # Sums of their own: products that wait for each other's sum are slow.
            pull_i = tl.dot(d_i, w_tiles[0], input_precision=PRECISION)
            pull_f = tl.dot(d_f, w_tiles[1], input_precision=PRECISION)
            pull_g = tl.dot(d_g, w_tiles[2], input_precision=PRECISION)
            pull_o = tl.dot(d_o, w_tiles[3], input_precision=PRECISION)
            dh += (pull_i + pull_f) + (pull_g + pull_o)
            dh = tl.where(clears, 0.0, dh)
        dc = tl.where(clears, 0.0, tl.where(acts, dc_now * f, dc))
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
        tl.store(dc_in + mine, dc, mask=here)


@triton.jit
@no_type_check
def _kept(gates, dy, cells, c_in, step, t, mine, units, here, H: tl.constexpr):
    """Load what the forward pass kept of a step, and the pull on its output."""
    gates_at = gates + (step + t)[:, None] * (4 * H) + units[None, :]
    i = tl.load(gates_at, mask=here, other=0.0)
    f = tl.load(gates_at + H, mask=here, other=0.0)
    g = tl.load(gates_at + 2 * H, mask=here, other=0.0)
    o = tl.load(gates_at + 3 * H, mask=here, other=0.0)
    at = (step + t)[:, None] * H + units[None, :]
    pulled = tl.load(dy + at, mask=here, other=0.0)
    if t == 0:
        before = tl.load(c_in + mine, mask=here, other=0.0).to(tl.float32)
    else:
        before = tl.load(cells + at - H, mask=here, other=0.0)
    return i, f, g, o, pulled, before


@triton.jit
@no_type_check
def _finish(
    dgates, dh, was, step, there, w, units, w_tiles,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the pull on the hidden state that a step has read, from the gradients of all of its gates."""
    at = dgates + step * (4 * H)
    if STAGES == 0:
        read = piece(at, there, 0, H, CHUNK)
        for gate in tl.static_range(4):
            # Sums of their own: products that wait for each other's sum are slow.
            pull = tl.zeros(dh.shape, tl.float32)
            for chunk in tl.static_range(CHUNKS):
                now = read
                if gate * CHUNKS + chunk + 1 < 4 * CHUNKS:
                    following = gate * CHUNKS + chunk + 1
                    read = piece(at + following // CHUNKS * H, there, following % CHUNKS, H, CHUNK)
                pull = tl.dot(now, w_tiles[gate * CHUNKS + chunk], pull, input_precision=PRECISION)
            dh += pull
    else:
        for part in tl.range(0, 4 * CHUNKS, num_stages=STAGES):
            gate = part // CHUNKS
            inputs = (part % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
            now = tl.load(
                at[:, None] + (gate * H + inputs)[None, :], mask=there & (inputs < H)[None, :], other=0.0
            )
            fits = (inputs < H)[:, None] & (units < H)[None, :]
            tile = tl.load(w + (gate * H + inputs)[:, None] * H + units[None, :], mask=fits, other=0.0)
            dh = tl.dot(now, tile, dh, input_precision=PRECISION)
    return tl.where((was & 1)[:, None] != 0, 0.0, dh)
