"""One case after the other: every rival prepared, judged, then timed in turns with all others."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.bench.cases import Case, Numbers, Precision, draw
from holdfast.bench.judge import Said, answers, as_said, errors_of, fate_of, timed_call, truth_of
from holdfast.bench.rivals import ON_GPU_ONLY, OURS, RIVALS, Rival
from holdfast.bench.timing import Ready, Times, interleaved, prepare

BOUNDS: dict[Precision, float] = {"float32": 1e-5, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 1e-2}
"""How far outputs and gradients may be off, relative to the largest entry."""
NO_WORSE = 1.5
"""Gradients of weights are sums over all steps: what the dense call is off by, others may be off by too."""
BASE: Precision = "float16"
"""The dense call in this precision is what a GPU's figures are held against, whatever is asked for."""


@dataclass(frozen=True)
class Measured:
    """What was found of one rival in one precision."""

    name: str
    precision: Precision
    ours: bool
    clears: bool
    how: str
    why_eager: str
    times: Times
    of_dense: float | None
    """Its time over that of the dense call in the same precision."""
    faster: float | None
    """The time of the dense call in float16 over its own; on a GPU."""
    output_error: float
    gradient_error: float
    dense_gradient_error: float
    """Of the dense call in the same precision; 0 where it was not measured."""
    at_huge: str
    first_seconds: float

    @property
    def right(self) -> bool:
        """Whether it is within its bound, and makes no NaN of huge inputs."""
        bound = BOUNDS[self.precision]
        allowed = max(bound, NO_WORSE * self.dense_gradient_error)
        return self.output_error <= bound and self.gradient_error <= allowed and self.at_huge != "NaN"

    def as_json(self) -> dict[str, Any]:
        """Write all figures; a number that is none is written as a word."""
        low, high = self.times.spread
        return {
            "rival": self.name,
            "precision": self.precision,
            "clears": self.clears,
            "timed": self.how,
            "why_eager": self.why_eager or None,
            "ms_median": self.times.median,
            "ms_p10": low,
            "ms_p90": high,
            "rounds": len(self.times.each),
            "of_dense": self.of_dense,
            "times_as_fast_as_dense_float16": self.faster,
            "output_error": _number(self.output_error),
            "gradient_error": _number(self.gradient_error),
            "inputs_of_1e4": self.at_huge,
            "right": self.right,
            "first_call_seconds": self.first_seconds,
        }


@dataclass(frozen=True)
class LeftOut:
    """Who could not be measured, and why, in one line."""

    name: str
    precision: Precision
    ours: bool
    why: str

    def line(self) -> str:
        """Tell it."""
        return f"{self.name} {self.precision} is left out: {self.why}"


@dataclass(frozen=True)
class Outcome:
    """All of one case."""

    case: Case
    measured: Sequence[Measured]
    left_out: Sequence[LeftOut]

    @property
    def good(self) -> bool:
        """Whether all of ours ran and were right."""
        return all(each.right for each in self.measured if each.ours) and not any(
            each.ours for each in self.left_out
        )

    def as_json(self) -> dict[str, Any]:
        """Write it all."""
        absent = [
            {"rival": each.name, "precision": each.precision, "why": each.why} for each in self.left_out
        ]
        return {**vars(self.case), "results": [each.as_json() for each in self.measured], "left_out": absent}


@dataclass(frozen=True)
class Bench:
    """How to measure: where, whom, in which precisions, how many rounds; `say` hears a line now and then."""

    device: torch.device
    rivals: Sequence[str]
    precisions: Sequence[Precision]
    rounds: int
    say: Callable[[str], None]

    def entrants(self) -> list[tuple[str, Precision]]:
        """List who is to be measured in what."""
        on_gpu = self.device.type == "cuda"
        found: list[tuple[str, Precision]] = [
            (name, precision)
            for name in self.rivals
            if on_gpu or name not in ON_GPU_ONLY
            for precision in self.precisions
        ]
        if on_gpu and "dense" in self.rivals and BASE not in self.precisions:
            found.append(("dense", BASE))
        return found


@dataclass(frozen=True)
class _Entrant:
    rival: Rival
    ready: Ready
    errors: tuple[float, float]
    at_huge: str


def measure(bench: Bench, case: Case) -> Outcome:
    """Measure one case: prepare and judge each rival, then time all of them in turns."""
    numbers = draw(case, bench.device)
    truths = {clears: truth_of(numbers, clears=clears) for clears in (True, False)}
    entrants: dict[tuple[str, Precision], _Entrant] = {}
    left_out = []
    for name, precision in bench.entrants():
        bench.say(f"{case}: {name} {precision}")
        try:
            entrants[name, precision] = _entrant(bench, case, numbers, truths, name, precision)
        except Exception as error:
            told = str(error).strip() or type(error).__name__
            left_out.append(LeftOut(name, precision, name in OURS, told.splitlines()[0]))
    del truths
    bench.say(f"{case}: {bench.rounds} rounds of {len(entrants)}")
    runs = {key: entrant.ready.run for key, entrant in entrants.items()}
    found = interleaved(runs, bench.device, bench.rounds)
    outcome = Outcome(case, [_measured(key, entrants, found, bench) for key in entrants], left_out)
    del runs, entrants
    _sweep(bench.device)
    return outcome


def _entrant(
    bench: Bench,
    case: Case,
    numbers: Numbers,
    truths: dict[bool, Said],
    name: str,
    precision: Precision,
) -> _Entrant:
    rival = RIVALS[name](case, numbers, precision)
    ready = prepare(timed_call(rival, numbers), bench.device, records=rival.records)
    at_huge = fate_of(answers(rival, numbers, huge=True))
    # What is timed is judged, after another call: a recording that reads freed memory finds that one's.
    errors = errors_of(as_said(rival, ready.run()), truths[rival.clears])
    return _Entrant(rival, ready, errors, at_huge)


def _measured(
    key: tuple[str, Precision],
    entrants: dict[tuple[str, Precision], _Entrant],
    found: dict[tuple[str, Precision], Times],
    bench: Bench,
) -> Measured:
    name, precision = key
    times, entrant, beside = found[key], entrants[key], entrants.get(("dense", precision))
    dense, base = found.get(("dense", precision)), found.get(("dense", BASE))
    output_error, gradient_error = entrant.errors
    return Measured(
        name=name,
        precision=precision,
        ours=entrant.rival.ours,
        clears=entrant.rival.clears,
        how=entrant.ready.how,
        why_eager=entrant.ready.why_eager,
        times=times,
        of_dense=None if dense is None else times.median / dense.median,
        faster=None if base is None or bench.device.type != "cuda" else base.median / times.median,
        output_error=output_error,
        gradient_error=gradient_error,
        dense_gradient_error=0.0 if beside is None or name == "dense" else beside.errors[1],
        at_huge=entrant.at_huge,
        first_seconds=entrant.ready.first_seconds,
    )


def _sweep(device: torch.device) -> None:
    """Give back what the case held: graphs have memory of their own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _number(value: float) -> float | str:
    return value if value == value and abs(value) != float("inf") else str(value)
