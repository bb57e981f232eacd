"""Choosing a plan by measuring, once for each kind of job; choices are kept in a file for later runs."""

import fcntl
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
from holdfast.memory.kernels.choices import Choices, adopt, chosen
from holdfast.memory.kernels.launch import Plan, processors_of
from holdfast.memory.kernels.plans import LEAST_ROOM, Job, candidates

Launch = Callable[[Plan], Any]


def choose(job: Job, device: torch.device, launch: Launch) -> Plan:
    """Choose the fastest plan for a job, as this process, the run it resumes, or an earlier one found it.

    While a graph is recorded nothing can be timed: the plan that needs least room is used, once.
    """
    job = job.rounded()
    if device.type == "cpu":
        return candidates(job, 1)[0]
    place, key = _signature(device), _key(job)
    numbers = chosen(place, key)
    if numbers is None:
        numbers = _read(_file()).get(place, {}).get(key)
        if numbers is None and torch.cuda.is_current_stream_capturing():
            return LEAST_ROOM
        if numbers is None:
            numbers = _keep(place, key, _measure(job, device, launch))
        adopt({place: {key: numbers}})
    return Plan(*numbers)


def _measure(job: Job, device: torch.device, launch: Launch) -> Plan:
    print(f"holdfast: choosing how to run {_key(job)}; kept in {_file()}", file=sys.stderr)
    times = {plan: _time(launch, plan) for plan in candidates(job, processors_of(device))}
    found = {plan: seconds for plan, seconds in times.items() if seconds is not None}
    if not found:
        raise ContractError(
            f"This GPU has no room to run {_key(job)} by our kernels; use policy.kernel=torch."
        )
    return min(found, key=found.__getitem__)


def _time(launch: Launch, plan: Plan) -> float | None:
    """Time a plan; none: this chip has no room for it."""
    try:
        # A median is one number, though others are lists of them.
        return cast("float", do_bench(lambda: launch(plan), warmup=5, rep=20, return_mode="median"))
    except (triton.OutOfResources, torch.OutOfMemoryError):
        return None
    except RuntimeError as error:
        if "cooperative launch" in str(error):
            return None
        raise


def _keep(place: str, key: str, plan: Plan) -> list[Any]:
    """Write a choice beside those of other processes; who was first is right."""
    file, numbers = _file(), list(astuple(plan))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with (file.parent / "kernels.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            told = _read(file)
            numbers = told.setdefault(place, {}).setdefault(key, numbers)
            aside = file.with_suffix(".part")
            aside.write_text(json.dumps(told, indent=1))
            aside.replace(file)
    except OSError as error:
        warn(f"{file} cannot be written ({error}): the next run measures its kernels again.", stacklevel=2)
    return numbers


def _read(file: Path) -> Choices:
    try:
        told = json.loads(file.read_text())
        for choices in told.values():
            for plan in choices.values():
                Plan(*plan)
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
