"""The counter-based draws of `rng` as one Triton kernel; imported where it is about to run."""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from holdfast.types import Int, Tensor

BLOCK = 512
KINDS = {"bits": 0, "uniform": 1, "randint": 2}


@triton.jit
@no_type_check
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit(do_not_specialize=["seed", "stream", "step", "limit", "steps"])
@no_type_check
def _draw(
    agent_ptr, step_ptr, out_ptr, count, steps, seed, stream, step, limit,
    HAS_STEP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    golden = 0x9E3779B97F4A7C15
    agent = tl.load(agent_ptr + offset // steps, mask=inside).to(tl.uint64)
    counter = tl.load(step_ptr + offset % steps, mask=inside).to(tl.uint64) if HAS_STEP else step.to(tl.uint64)
    x = _mix(_mix(agent * golden + seed.to(tl.uint64)) + stream.to(tl.uint64) * golden)
    x = _mix(x + counter * golden)
    if KIND == 0:
        tl.store(out_ptr + offset, x.to(tl.int64), mask=inside)
    elif KIND == 1:
        tl.store(out_ptr + offset, (x >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08, mask=inside)
    else:
        tl.store(out_ptr + offset, (((x >> 33) * limit.to(tl.uint64)) >> 31).to(tl.int64), mask=inside)


def draw(
    kind: str, agent: Int[Tensor, "..."], step: int | Int[Tensor, "..."], *, seed: int, stream: int, limit: int = 1
) -> Tensor:
    """Draw bits, uniform numbers or integers below a limit, one per agent; of agents `[A,1]` one for each step."""
    dtype, steps = torch.float32 if kind == "uniform" else torch.int64, 1
    at, number = (step, 0) if isinstance(step, Tensor) else (agent, step)
    shape = agent.shape
    if isinstance(step, Tensor) and step.dim():
        steps = len(step)
        shape = len(agent), steps
    out = torch.empty(shape, dtype=dtype, device=agent.device)
    inputs = agent, at, out, out.numel(), steps, seed, stream, number, limit
    has_step = isinstance(step, Tensor)
    _draw[(triton.cdiv(out.numel(), BLOCK),)](*inputs, HAS_STEP=has_step, KIND=KINDS[kind], BLOCK=BLOCK)
    return out
