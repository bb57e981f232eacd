"""What the kernels share: gate functions, tiles of weights, and how programs wait for each other."""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def tanh(x, APPROX: tl.constexpr):
    """Hyperbolic tangent in float32; `APPROX` is the hardware's, good to 11 bits, for 16-bit numbers."""
    if APPROX:
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = 2.0 * tl.sigmoid(2.0 * x) - 1.0
    return y


@triton.jit
@no_type_check
def sigmoid(x, APPROX: tl.constexpr):
    """Logistic function in float32."""
    if APPROX:
        y = 0.5 + 0.5 * tanh(0.5 * x, True)
    else:
        y = tl.sigmoid(x)
    return y


@triton.jit
@no_type_check
def tiles(
    w, units, over, along, H: tl.constexpr, GATES: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):
    """Load a program's part of the weights, gate by gate, in tiles of `CHUNK` inputs by its units."""
    loaded = ()
    for gate in tl.static_range(GATES):
        for chunk in tl.static_range(CHUNKS):
            inputs = chunk * CHUNK + tl.arange(0, CHUNK)
            fits = (inputs < H)[:, None] & (units < H)[None, :]
            at = w + gate * H * H + inputs[:, None] * over + units[None, :] * along
            loaded += (tl.load(at, mask=fits, other=0.0),)
    return loaded


@triton.jit
@no_type_check
def piece(at, there, chunk: tl.constexpr, H: tl.constexpr, CHUNK: tl.constexpr):
    """Load a piece of what the programs of a group hand each other; volatile: from no cache of one's own."""
    inputs = chunk * CHUNK + tl.arange(0, CHUNK)
    fits = there & (inputs < H)[None, :]
    return tl.load(at[:, None] + inputs[None, :], mask=fits, other=0.0, volatile=True)


@triton.jit
@no_type_check
def handed(at, there, H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TOGETHER: tl.constexpr):
    """Load all pieces, again until all are written: what is not has all its bits set."""
    pieces = _pieces(at, there, H, CHUNK, CHUNKS)
    if TOGETHER:
        while tl.max(_missing(pieces, CHUNKS)) > 0:
            pieces = _pieces(at, there, H, CHUNK, CHUNKS)
    return pieces


@triton.jit
@no_type_check
def _pieces(at, there, H: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    loaded = ()
    for chunk in tl.static_range(CHUNKS):
        loaded += (piece(at, there, chunk, H, CHUNK),)
    return loaded


@triton.jit
@no_type_check
def _missing(pieces, CHUNKS: tl.constexpr):
    missing = (_bits(pieces[0]) == -1).to(tl.int32)
    for chunk in tl.static_range(1, CHUNKS):
        missing |= (_bits(pieces[chunk]) == -1).to(tl.int32)
    return missing


@triton.jit
@no_type_check
def _bits(tile):
    if tile.dtype.primitive_bitwidth == 16:
        bits = tile.to(tl.int16, bitcast=True)
    else:
        bits = tile.to(tl.int32, bitcast=True)
    return bits


@triton.jit
@no_type_check
def tame(h):
    """Make any NaN the usual one: its bits are not all ones, which means that nothing is written yet."""
    return tl.where(h == h, h, float("nan"))


@triton.jit
@no_type_check
def arrive(counter):
    """Tell the programs of a group that all this one has stored may be read."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
@no_type_check
def wait(counter, until):
    """Wait until so many arrivals were told; what was stored before them can be read then."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred more; .reg .s32 told;
        again: ld.acquire.gpu.global.s32 told, [$1];
        setp.lt.s32 more, told, $2;
        @more bra again;
        mov.b32 $0, told; }""",
        "=r,l,r",
        [counter, until],
        tl.int32,
        False,
        1,
    )
    tl.debug_barrier()
