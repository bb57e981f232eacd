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


@triton.jit(do_not_specialize=["seed", "stream", "step", "limit"])
@no_type_check
def _draw(
    agent_ptr, step_ptr, out_ptr, count, seed, stream, step, limit,
    HAS_STEP: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < count
    golden = 0x9E3779B97F4A7C15
    agent = tl.load(agent_ptr + offset, mask=inside).to(tl.uint64)
    counter = tl.load(step_ptr).to(tl.uint64) if HAS_STEP else step.to(tl.uint64)
    x = _mix(_mix(agent * golden + seed.to(tl.uint64)) + stream.to(tl.uint64) * golden)
    x = _mix(x + counter * golden)
    if KIND == 0:
        tl.store(out_ptr + offset, x.to(tl.int64), mask=inside)
    elif KIND == 1:
        tl.store(out_ptr + offset, (x >> 40).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08, mask=inside)
    else:
        tl.store(out_ptr + offset, (((x >> 33) * limit.to(tl.uint64)) >> 31).to(tl.int64), mask=inside)


def draw(
    kind: str, agent: Int[Tensor, "..."], step: int | Int[Tensor, ""], *, seed: int, stream: int, limit: int = 1
) -> Tensor:
    """Draw bits, uniform numbers or integers below a limit, one per agent."""
    out = torch.empty(agent.shape, dtype=torch.float32 if kind == "uniform" else torch.int64, device=agent.device)
    has_step = isinstance(step, Tensor)
    inputs = agent, step if has_step else agent, out, agent.numel(), seed, stream, 0 if has_step else step, limit
    _draw[(triton.cdiv(agent.numel(), BLOCK),)](*inputs, HAS_STEP=has_step, KIND=KINDS[kind], BLOCK=BLOCK)
    return out
