"""Choice of launch plans: candidates, timing and cache.

Triton is imported only to time a plan: checkpoints read and write plans on machines without it.
"""

import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast
from warnings import warn

import torch

from holdfast.errors import ContractError

T = TypeVar("T")


@dataclass(frozen=True)
class LaunchPlan:
    """Tile sizes of a launch."""

    rows: int
    """Rows per program."""
    units: int
    """Hidden units per program; with fewer than the layer has, it is split over several programs."""
    warps: int
    chunk: int = 128
    """Inputs per matrix product of a split layer."""
    stages: int = 0
    """Pipeline stages of streamed weights; 0: each program keeps its weights on chip."""
    share: int = 1
    """Programs of a split layer per multiprocessor."""


MAX_UNSPLIT = 128
"""Beyond this a layer's weights do not fit into one program, even in 16 bits."""
TIMED_ROWS = 512
"""Plans for fewer rows are not timed: the first that fits is taken, since timing takes longer than it saves."""
SMALLEST = LaunchPlan(rows=32, units=32, warps=4, chunk=32, stages=2)


class TuningJob(NamedTuple):
    """A kernel call, as far as its plan depends on it."""

    kernel: str
    """`lstm_forward`, `lstm_backward`, `gru_forward` or `gru_backward`."""
    hidden: int
    rows: int
    one_step: bool
    dtype: torch.dtype
    precision: str
    keep: bool = True

    def rounded(self) -> "TuningJob":
        """Round the batch size up to a power of two, so similar sizes share a plan."""
        return self._replace(rows=1 << (self.rows - 1).bit_length())


def candidates(job: TuningJob, processors: int) -> list[LaunchPlan]:
    """List the plans to time for a job."""
    if job.dtype == torch.float32:
        plans = _float32_plans(job, processors)
    elif job.hidden <= MAX_UNSPLIT:
        plans = _unsplit_plans(job, processors)
    else:
        plans = _split_plans(job, processors)
    return [*plans, SMALLEST]


def _unsplit_plans(job: TuningJob, processors: int) -> list[LaunchPlan]:
    if job.hidden <= 64:
        return [LaunchPlan(16, 64, 4), LaunchPlan(32, 64, 4), LaunchPlan(64, 64, 8)]
    narrow, wide, split = LaunchPlan(16, 128, 8), LaunchPlan(32, 128, 8), LaunchPlan(16, 32, 4)
    if _num_programs(job, split) <= processors:
        return [split, narrow]
    return [narrow, wide] if _num_programs(job, narrow) <= processors else [wide, narrow]


def _split_plans(job: TuningJob, processors: int) -> list[LaunchPlan]:
    backward = job.kernel.endswith("backward")
    plans = []
    small = LaunchPlan(16, 32, 4, chunk=256)
    if _num_programs(job, small) <= processors:
        plans.append(small)
    medium = LaunchPlan(32, 32, 4, chunk=128, stages=3) if backward else LaunchPlan(32, 32, 4, chunk=128)
    if _num_programs(job, medium) <= 2 * processors:
        plans.append(medium)
    if job.hidden <= 256 and not backward:
        plans.append(LaunchPlan(32, 64, 8, chunk=256))
    shared = LaunchPlan(64, 32, 4, chunk=64, stages=3, share=2)
    if job.rows >= 2048 and backward:
        return [LaunchPlan(64, 64, 8, chunk=64, stages=3), shared]
    return [*plans, shared, LaunchPlan(64, 64, 8, chunk=64, stages=3)]


def _float32_plans(job: TuningJob, processors: int) -> list[LaunchPlan]:
    plans = [LaunchPlan(16, 64, 4)] if job.hidden <= 64 else []
    on_chip = LaunchPlan(16, 32, 4, chunk=64)
    if job.hidden <= 128 and _num_programs(job, on_chip) <= 2 * processors:
        plans.append(on_chip)
    return [*plans, LaunchPlan(32, 32, 4, chunk=32, stages=3), LaunchPlan(64, 32, 4, chunk=32, stages=3)]


def _num_programs(job: TuningJob, plan: LaunchPlan) -> int:
    return -(-job.rows // plan.rows) * -(-job.hidden // plan.units)


PlanTable = dict[str, dict[str, list[Any]]]
"""Fields of each LaunchPlan, by machine signature and job."""

_plans: PlanTable = {}


def all_plans() -> PlanTable:
    """Return a copy of all plans chosen or loaded in this process."""
    return {signature: dict(jobs) for signature, jobs in _plans.items()}


def load_plans(table: Any) -> None:
    """Add the plans of another process; malformed entries are skipped."""
    for signature, jobs in table.items() if isinstance(table, dict) else ():
        for job, plan in jobs.items() if isinstance(jobs, dict) else ():
            if isinstance(plan, list) and len(plan) == len(fields(LaunchPlan)) and all(type(n) is int for n in plan):
                _plans.setdefault(signature, {})[job] = list(plan)


Launch = Callable[[LaunchPlan], Any]


def choose_plan(job: TuningJob, device: torch.device, launch: Launch) -> LaunchPlan:
    """Return the plan for a job: from this process, the resumed run, the cache file, or timed now if it is large.

    While a CUDA graph is captured nothing can be timed: the smallest plan is used, once.
    """
    job = job.rounded()
    if device.type == "cpu":
        return candidates(job, 1)[0]
    signature, key = _signature(device), _key(job)
    plan = _plans.get(signature, {}).get(key)
    if plan is None:
        plan = _read_cache(_cache_file()).get(signature, {}).get(key)
        if plan is None and torch.cuda.is_current_stream_capturing():
            return SMALLEST
        if plan is None and job.rows < TIMED_ROWS:
            quick = _first_that_fits(job, device, launch)
            plan = None if quick is None else list(astuple(quick))
        if plan is None:
            plan = _save_plan(signature, key, _measure(job, device, launch))
        load_plans({signature: {key: plan}})
    return LaunchPlan(*plan)


def _measure(job: TuningJob, device: torch.device, launch: Launch) -> LaunchPlan:
    _print_once(f"holdfast: timing kernels for this GPU, once for each size; cached in {_cache_file()}")
    times = {plan: _time(launch, plan) for plan in candidates(job, processors_of(device))}
    measured = {plan: seconds for plan, seconds in times.items() if seconds is not None}
    if not measured:
        raise ContractError(
            f"This GPU has too little memory to run {_key(job)} with our kernels; use policy.kernel=torch."
        )
    return min(measured, key=measured.__getitem__)


@cache
def _print_once(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _first_that_fits(job: TuningJob, device: torch.device, launch: Launch) -> LaunchPlan | None:
    """Return the first plan that runs on this GPU."""
    plans = candidates(job, processors_of(device))
    return next((plan for plan in plans if _if_it_fits(lambda plan=plan: (launch(plan), True)[1])), None)


def _time(launch: Launch, plan: LaunchPlan) -> float | None:
    """Return the median milliseconds of a plan; None: it does not fit this GPU."""
    from triton.testing import do_bench

    # do_bench returns a float for the median, but is annotated for all modes.
    return _if_it_fits(lambda: cast("float", do_bench(lambda: launch(plan), warmup=5, rep=20, return_mode="median")))


def _if_it_fits(call: Callable[[], T]) -> T | None:
    """Return what a call that launches a plan returns; None: the plan does not fit this GPU."""
    import triton

    try:
        return call()
    except (triton.OutOfResources, torch.OutOfMemoryError):
        return None
    except RuntimeError as error:
        if "cooperative launch" in str(error):
            return None
        raise


def _save_plan(signature: str, key: str, plan: LaunchPlan) -> list[Any]:
    """Add a plan to the cache file; if another process added one first, return that."""
    file, numbers = _cache_file(), list(astuple(plan))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with (file.parent / "kernels.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            table = _read_cache(file)
            numbers = table.setdefault(signature, {}).setdefault(key, numbers)
            temporary = file.with_suffix(".part")
            temporary.write_text(json.dumps(table, indent=1))
            temporary.replace(file)
    except OSError as error:
        warn(f"{file} cannot be written ({error}): the next run times its kernels again.", stacklevel=2)
    return numbers


def _read_cache(file: Path) -> PlanTable:
    try:
        table = json.loads(file.read_text())
        for jobs in table.values():
            for plan in jobs.values():
                LaunchPlan(*plan)
    except (OSError, ValueError, TypeError, AttributeError):
        # A damaged cache is measured again.
        return {}
    return table


def _cache_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast" / "kernels.json"


def _key(job: TuningJob) -> str:
    cell, direction = job.kernel.split("_")
    steps = "a step" if job.one_step else "segments"
    mode = "" if job.keep else ", no gradients"
    return (
        f"{cell} {direction}, {steps} of {job.rows} rows, hidden size {job.hidden}, "
        f"{str(job.dtype).removeprefix('torch.')} ({job.precision}){mode}"
    )


@cache
def processors_of(device: torch.device) -> int:
    """Return the number of multiprocessors; a CPU, where kernels are interpreted, has 1."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _signature(device: torch.device) -> str:
    """Identify what plans are valid for: GPU, Triton version and kernel sources."""
    import triton

    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(source).hexdigest()[:12]
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}, kernels {digest}"
