"""Measurement of a case: each implementation prepared and checked, then all timed in turns."""

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from holdfast.bench.cases import Case, CaseInputs, Precision, draw
from holdfast.bench.implementations import (
    IMPLEMENTATIONS,
    ON_GPU_ONLY,
    OURS,
    CellOutputs,
    errors_of,
    outcome_of,
    reference_outputs,
)
from holdfast.bench.timing import TimedCall, Times, interleaved, prepare

BOUNDS: dict[Precision, float] = {"float32": 1e-5, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 1e-2}
"""Largest error of outputs and gradients, relative to the largest entry."""
DENSE_FACTOR = 1.5
"""Weight gradients are sums over all steps: errors up to this multiple of the dense call's are allowed."""
BASE: Precision = "float16"
"""Precision of the dense call that GPU results are compared with."""
NOT_TIMED = Times(())


@dataclass(frozen=True)
class ImplementationResult:
    """Result of one implementation in one precision."""

    name: str
    precision: Precision
    clears: bool
    how: str
    why_eager: str
    first_seconds: float
    output_error: float
    gradient_error: float
    at_huge: str
    dense_gradient_error: float = 0.0
    """Error of the dense call in the same precision; 0: not measured."""
    times: Times = NOT_TIMED
    of_dense: float | None = None
    """Time relative to the dense call in the same precision."""
    faster: float | None = None
    """Speedup over the dense call in float16, on a GPU."""

    @property
    def right(self) -> bool:
        """Whether errors are within bounds and huge inputs give no NaN."""
        bound = BOUNDS[self.precision]
        allowed = max(bound, DENSE_FACTOR * self.dense_gradient_error)
        return self.output_error <= bound and self.gradient_error <= allowed and self.at_huge != "NaN"

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON; non-finite numbers become strings."""
        low, high = self.times.spread
        return {
            "implementation": self.name,
            "precision": self.precision,
            "clears": self.clears,
            "timed": self.how,
            "why_eager": self.why_eager or None,
            "ms_median": self.times.median,
            "ms_p10": low,
            "ms_p90": high,
            "rounds": len(self.times.values),
            "of_dense": self.of_dense,
            "times_as_fast_as_dense_float16": self.faster,
            "output_error": _number(self.output_error),
            "gradient_error": _number(self.gradient_error),
            "inputs_of_1e4": self.at_huge,
            "right": self.right,
            "first_call_seconds": self.first_seconds,
        }


@dataclass(frozen=True)
class Skipped:
    """An implementation that could not be measured, and why, in one line."""

    name: str
    precision: Precision
    why: str

    def line(self) -> str:
        """Return a line for the console."""
        return f"{self.name} {self.precision} is skipped: {self.why}"


@dataclass(frozen=True)
class CaseResult:
    """Results of one case."""

    case: Case
    measured: Sequence[ImplementationResult]
    skipped: Sequence[Skipped]

    @property
    def good(self) -> bool:
        """Whether all of ours ran and were right."""
        ran = not any(skipped.name in OURS for skipped in self.skipped)
        return ran and all(result.right for result in self.measured if result.name in OURS)

    def as_json(self) -> dict[str, Any]:
        """Return all results as JSON."""
        skipped = [{"implementation": s.name, "precision": s.precision, "why": s.why} for s in self.skipped]
        results = [result.as_json() for result in self.measured]
        return {**vars(self.case), "results": results, "skipped": skipped}


@dataclass(frozen=True)
class Bench:
    """Settings of a benchmark; `log` gets a line of progress now and then."""

    device: torch.device
    implementations: Sequence[str]
    precisions: Sequence[Precision]
    rounds: int
    log: Callable[[str], None]

    def combinations(self) -> list[tuple[str, Precision]]:
        """List the implementations and precisions to measure."""
        on_gpu = self.device.type == "cuda"
        names = [name for name in self.implementations if on_gpu or name not in ON_GPU_ONLY]
        combinations = list(product(names, self.precisions))
        if on_gpu and "dense" in self.implementations and BASE not in self.precisions:
            combinations.append(("dense", BASE))
        return combinations


def measure(bench: Bench, case: Case) -> CaseResult:
    """Measure one case: prepare and check each implementation, then time all in turns."""
    inputs = draw(case, bench.device)
    truths = {clears: reference_outputs(inputs, clears=clears) for clears in (True, False)}
    runs: dict[tuple[str, Precision], TimedCall] = {}
    results, skipped = [], []
    for name, precision in bench.combinations():
        bench.log(f"{case}: {name} {precision}")
        try:
            runs[name, precision], result = _prepare_and_check(bench, case, inputs, truths, name, precision)
            results.append(result)
        except Exception as error:
            message = str(error).strip() or type(error).__name__
            skipped.append(Skipped(name, precision, message.splitlines()[0]))
    del truths
    bench.log(f"{case}: {bench.rounds} rounds of {len(runs)}")
    times = interleaved(runs, bench.device, bench.rounds)
    # Free the memory of the case; CUDA graphs have their own pools.
    del runs
    gc.collect()
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    return CaseResult(case, [_with_times(result, results, times, bench) for result in results], skipped)


def _prepare_and_check(
    bench: Bench, case: Case, inputs: CaseInputs, truths: dict[bool, CellOutputs], name: str, precision: Precision
) -> tuple[TimedCall, ImplementationResult]:
    """Return the call to time, and a result without times."""
    implementation = IMPLEMENTATIONS[name](case, inputs, precision)
    call = implementation.timed_call(inputs.x_BTH, inputs.grad_BTH)
    ready = prepare(call, bench.device, records=implementation.capturable)
    at_huge = outcome_of(implementation.timed_call(inputs.huge_BTH, inputs.grad_BTH)())
    # Check the timed call itself, after another call: a graph that reads freed memory gets the wrong values.
    errors = errors_of(ready.run(), truths[implementation.clears])
    how = (ready.how, ready.why_eager, ready.first_seconds)
    return ready.run, ImplementationResult(name, precision, implementation.clears, *how, *errors, at_huge)


def _with_times(
    result: ImplementationResult,
    results: Sequence[ImplementationResult],
    times: dict[tuple[str, Precision], Times],
    bench: Bench,
) -> ImplementationResult:
    """Add the times, and the comparison with the dense call."""
    own = times[result.name, result.precision]
    dense, base = times.get(("dense", result.precision)), times.get(("dense", BASE))
    dense_errors = {other.precision: other.gradient_error for other in results if other.name == "dense"}
    return replace(
        result,
        times=own,
        of_dense=None if dense is None else own.median / dense.median,
        faster=None if base is None or bench.device.type != "cuda" else base.median / own.median,
        dense_gradient_error=0.0 if result.name == "dense" else dense_errors.get(result.precision, 0.0),
    )


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
