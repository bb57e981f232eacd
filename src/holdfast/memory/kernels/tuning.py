"""Choosing a plan by measuring, once for each kind of job; choices are kept in a file for later runs.

A run that is resumed must choose as it did before: other plans round otherwise.
"""

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any, cast
from warnings import warn

import torch
import triton
from triton.testing import do_bench

from holdfast.errors import ContractError
from holdfast.memory.kernels.launch import Plan, processors_of
from holdfast.memory.kernels.plans import Job, candidates

Launch = Callable[[Plan], Any]

_chosen: dict[tuple[str, Job], Plan] = {}


def choose(job: Job, device: torch.device, launch: Launch) -> Plan:
    """Choose the fastest plan for a job; without a GPU, or while one records a graph, the likeliest."""
    job = job.rounded()
    if device.type == "cpu":
        return candidates(job, 1)[0]
    place = _signature(device)
    plan = _chosen.get((place, job))
    if plan is None:
        plan = _kept().get(place, {}).get(_key(job))
        if plan is None and torch.cuda.is_current_stream_capturing():
            # Nothing can be timed now; a later call measures.
            return candidates(job, processors_of(device))[0]
        if plan is None:
            plan = _measure(job, device, launch)
            _keep(place, job, plan)
        _chosen[place, job] = plan
    return plan


def _measure(job: Job, device: torch.device, launch: Launch) -> Plan:
    print(f"holdfast: choosing how to run {_key(job)}; kept in {_file()}", file=sys.stderr)
    times = {plan: _time(launch, plan) for plan in candidates(job, processors_of(device))}
    found = {plan: seconds for plan, seconds in times.items() if seconds is not None}
    if not found:
        raise ContractError(f"None of our kernels runs {_key(job)} on this GPU; use policy.kernel=torch.")
    return min(found, key=found.__getitem__)


def _time(launch: Launch, plan: Plan) -> float | None:
    """Time a plan; none: this chip has no room for it."""
    try:
        # A median is one number, though others are lists of them.
        return cast("float", do_bench(lambda: launch(plan), warmup=5, rep=20, return_mode="median"))
    except (triton.OutOfResources, triton.CompilationError, RuntimeError) as error:
        if "out of memory" in str(error):
            raise
        return None


def _keep(place: str, job: Job, plan: Plan) -> None:
    """Write a choice beside those that other runs have written meanwhile."""
    file = _file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        told = _read(file)
        told.setdefault(place, {})[_key(job)] = list(astuple(plan))
        aside = file.with_suffix(f".{os.getpid()}")
        aside.write_text(json.dumps(told, indent=1))
        aside.replace(file)
    except OSError as error:
        warn(f"{file} cannot be written ({error}): the next run measures its kernels again.", stacklevel=2)


@cache
def _kept() -> dict[str, dict[str, Plan]]:
    """Read what was chosen before this process began."""
    return {place: {job: Plan(*plan) for job, plan in told.items()} for place, told in _read(_file()).items()}


def _read(file: Path) -> dict[str, dict[str, list[Any]]]:
    try:
        told = json.loads(file.read_text())
        for choices in told.values():
            for plan in choices.values():
                Plan(*plan)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):
        # Choices can be measured anew.
        return {}
    return told


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holdfast" / "kernels.json"


def _key(job: Job) -> str:
    kind, direction = job.kernel.split("_")
    steps = "a step" if job.one_step else "segments"
    kept = "" if job.keep else ", no gradients"
    return (
        f"{kind} {direction}, {steps} of {job.rows} rows, hidden size {job.hidden}, "
        f"{str(job.dtype).removeprefix('torch.')} ({job.precision}){kept}"
    )


@cache
def _signature(device: torch.device) -> str:
    """Say what choices hold for: the chip, Triton, and what the kernels are."""
    source = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    digest = hashlib.sha256(source).hexdigest()[:12]
    return f"{torch.cuda.get_device_name(device)}, triton {triton.__version__}, kernels {digest}"
