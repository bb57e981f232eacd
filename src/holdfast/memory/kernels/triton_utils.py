"""Device functions of both kernels: places, gates, weight tiles, and synchronization of programs."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def place(row0, B, T, H: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, SPLITS: tl.constexpr):
    """Return a program's group, rows, units and masks, and where its states and the steps of its rows begin."""
    group = tl.program_id(0) // SPLITS
    rows = row0 + group * ROWS + tl.arange(0, ROWS)
    units = (tl.program_id(0) % SPLITS) * UNITS + tl.arange(0, UNITS)
    row_mask = (rows < B)[:, None]
    mask = row_mask & (units < H)[None, :]
    state_at = rows.to(tl.int64)[:, None] * H + units[None, :]
    step = rows.to(tl.int64) * T
    return group, rows, units, row_mask, mask, state_at, step


@triton.jit
@no_type_check
def tanh(x, APPROX: tl.constexpr):
    """Hyperbolic tangent in float32; `APPROX`: the hardware's, accurate to 11 bits, for 16-bit types."""
    if APPROX:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
@no_type_check
def sigmoid(x, APPROX: tl.constexpr):
    """Logistic function in float32."""
    return 0.5 + 0.5 * tanh(0.5 * x, True) if APPROX else tl.sigmoid(x)


@triton.jit
@no_type_check
def load_gates(values, step, units, mask, H: tl.constexpr, GATES: tl.constexpr):
    """Load a step's value of each gate."""
    at = values + step[:, None] * (GATES * H) + units[None, :]
    loaded = ()
    for gate in tl.static_range(GATES):
        loaded += (tl.load(at + gate * H, mask=mask, other=0.0),)
    return loaded


@triton.jit
@no_type_check
def store_gates(values, gates, step, units, mask, H: tl.constexpr):
    """Store a step's four values, gates or gradients, in the type of the buffer."""
    at = values + step[:, None] * (4 * H) + units[None, :]
    for gate in tl.static_range(4):
        tl.store(at + gate * H, gates[gate].to(values.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def load_weights(
    w, units, over, along, H: tl.constexpr, GATES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Load a program's weights, gate by gate, in tiles of `CHUNK` inputs by its units."""
    loaded = ()
    for gate in tl.static_range(GATES):
        for chunk in tl.static_range(CHUNKS):
            inputs = chunk * CHUNK + tl.arange(0, CHUNK)
            mask = (inputs < H)[:, None] & (units < H)[None, :]
            at = w + gate * H * H + inputs[:, None] * over + units[None, :] * along
            loaded += (tl.load(at, mask=mask, other=0.0),)
    return loaded


@triton.jit
@no_type_check
def load_tile(at, row_mask, chunk: tl.constexpr, H: tl.constexpr, CHUNK: tl.constexpr):
    """Load one tile of exchanged values; volatile, to bypass the program's own cache."""
    inputs = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = row_mask & (inputs < H)[None, :]
    return tl.load(at[:, None] + inputs[None, :], mask=mask, other=0.0, volatile=True)


@triton.jit
@no_type_check
def load_when_written(
    at, row_mask, H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, COOPERATIVE: tl.constexpr
):
    """Load all tiles, again until all are written: unwritten values have all bits set."""
    tiles = _load_tiles(at, row_mask, H, CHUNK, CHUNKS)
    if COOPERATIVE:
        while tl.max(_missing(tiles, CHUNKS)) > 0:
            tiles = _load_tiles(at, row_mask, H, CHUNK, CHUNKS)
    return tiles


@triton.jit
@no_type_check
def _load_tiles(at, row_mask, H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    loaded = ()
    for chunk in tl.static_range(CHUNKS):
        loaded += (load_tile(at, row_mask, chunk, H, CHUNK),)
    return loaded


@triton.jit
@no_type_check
def _missing(tiles, CHUNKS: tl.constexpr):
    missing = (_bits(tiles[0]) == -1).to(tl.int32)
    for chunk in tl.static_range(1, CHUNKS):
        missing |= (_bits(tiles[chunk]) == -1).to(tl.int32)
    return missing


@triton.jit
@no_type_check
def _bits(tile):
    return tile.to(tl.int16 if tile.dtype.primitive_bitwidth == 16 else tl.int32, bitcast=True)


@triton.jit
@no_type_check
def add_recurrent_grad(
    dgates, dh, flags, step, row_mask, w, units, w_tiles, GATES: tl.constexpr, FIRST: tl.constexpr,
    H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradient of the hidden state a step read; its gate gradients begin with gate `FIRST` of the weights."""
    at = dgates + step * (4 * H)
    if STAGES == 0:
        next_tile = load_tile(at, row_mask, 0, H, CHUNK)
        for gate in tl.static_range(GATES):
            # Separate accumulators: chained products wait for each other.
            grad = tl.zeros(dh.shape, tl.float32)
            for chunk in tl.static_range(CHUNKS):
                d_tile = next_tile
                if gate * CHUNKS + chunk + 1 < GATES * CHUNKS:
                    following = gate * CHUNKS + chunk + 1
                    next_tile = load_tile(at + following // CHUNKS * H, row_mask, following % CHUNKS, H, CHUNK)
                w_tile = w_tiles[(gate + FIRST) % GATES * CHUNKS + chunk]
                grad = tl.dot(d_tile, w_tile, grad, input_precision=PRECISION)
            dh += grad
    else:
        for tile in tl.range(0, GATES * CHUNKS, num_stages=STAGES):
            gate = tile // CHUNKS
            inputs = (tile % CHUNKS) * CHUNK + tl.arange(0, CHUNK)
            d_tile = tl.load(
                at[:, None] + (gate * H + inputs)[None, :], mask=row_mask & (inputs < H)[None, :], other=0.0
            )
            w_mask = (inputs < H)[:, None] & (units < H)[None, :]
            w_row = ((gate + FIRST) % GATES if FIRST else gate) * H + inputs
            w_tile = tl.load(w + w_row[:, None] * H + units[None, :], mask=w_mask, other=0.0)
            dh = tl.dot(d_tile, w_tile, dh, input_precision=PRECISION)
    return tl.where((flags & 1)[:, None] != 0, 0.0, dh)


@triton.jit
@no_type_check
def canonical_nan(h):
    """Replace every NaN by the standard one: a NaN with all bits set would count as unwritten."""
    return tl.where(h == h, h, float("nan"))


@triton.jit
@no_type_check
def arrive(counter):
    """Signal to the group that all stores of this program are visible."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
@no_type_check
def wait(counter, until):
    """Wait for `until` arrivals; the stores before them are then visible."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred more; .reg .s32 count;
        again: ld.acquire.gpu.global.s32 count, [$1];
        setp.lt.s32 more, count, $2;
        @more bra again;
        mov.b32 $0, count; }""",
        "=r,l,r",
        [counter, until],
        tl.int32,
        False,
        1,
    )
    tl.debug_barrier()
