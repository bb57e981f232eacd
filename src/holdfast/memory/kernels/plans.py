"""Which plans are worth trying for a layer: few, the likeliest first, the one that needs least room last."""

from typing import NamedTuple

import torch

from holdfast.memory.kernels.launch import Plan

WIDEST_WHOLE = 128
"""Beyond this a layer's weights do not fit beside one program's work, even in 16 bits."""
LEAST_ROOM = Plan(rows=32, units=32, warps=4, chunk=32, stages=2)


class Job(NamedTuple):
    """What is to be run: all that a choice of plan depends on."""

    kernel: str
    """`lstm_forward`, `lstm_backward`, `gru_forward` or `gru_backward`."""
    hidden: int
    rows: int
    one_step: bool
    dtype: torch.dtype
    precision: str
    keep: bool = True

    def rounded(self) -> "Job":
        """Give batches of nearly one size one plan."""
        return self._replace(rows=1 << (self.rows - 1).bit_length())


def candidates(job: Job, processors: int) -> list[Plan]:
    """List plans for a job on a chip of so many processors."""
    if job.dtype == torch.float32:
        plans = _in_float32(job, processors)
    elif job.hidden <= WIDEST_WHOLE:
        plans = _whole(job, processors)
    else:
        plans = _split(job, processors)
    return [*plans, LEAST_ROOM]


def _whole(job: Job, processors: int) -> list[Plan]:
    if job.hidden <= 64:
        return [Plan(16, 64, 4), Plan(32, 64, 4), Plan(64, 64, 8)]
    narrow, wide, split = Plan(16, 128, 8), Plan(32, 128, 8), Plan(16, 32, 4)
    if _programs(job, split) <= processors:
        return [split, narrow]
    return [narrow, wide] if _programs(job, narrow) <= processors else [wide, narrow]


def _split(job: Job, processors: int) -> list[Plan]:
    backward = job.kernel.endswith("backward")
    plans = []
    few = Plan(16, 32, 4, chunk=256)
    if _programs(job, few) <= processors:
        plans.append(few)
    some = Plan(32, 32, 4, chunk=128, stages=3) if backward else Plan(32, 32, 4, chunk=128)
    if _programs(job, some) <= 2 * processors:
        plans.append(some)
    if job.hidden <= 256 and not backward:
        plans.append(Plan(32, 64, 8, chunk=256))
    two_at_once = Plan(64, 32, 4, chunk=64, stages=3, share=2)
    if job.rows >= 2048 and backward:
        return [Plan(64, 64, 8, chunk=64, stages=3), two_at_once]
    return [*plans, two_at_once, Plan(64, 64, 8, chunk=64, stages=3)]


def _in_float32(job: Job, processors: int) -> list[Plan]:
    plans = [Plan(16, 64, 4)] if job.hidden <= 64 else []
    kept = Plan(16, 32, 4, chunk=64)
    if job.hidden <= 128 and _programs(job, kept) <= 2 * processors:
        plans.append(kept)
    return [*plans, Plan(32, 32, 4, chunk=32, stages=3), Plan(64, 32, 4, chunk=32, stages=3)]


def _programs(job: Job, plan: Plan) -> int:
    return -(-job.rows // plan.rows) * -(-job.hidden // plan.units)
