"""Numbers that change over a run."""

import math

from holdfast.config import Config
from holdfast.trainer_knobs import ScheduleKind, Trainer, scheduled_from, with_numbers


def scheduled(kind: ScheduleKind, start: float, end: float, progress: float) -> float:
    """Say what a number is after a share of the run: `start` at 0, `end` from 1 on.

    linear: straight. cosine: half a wave, slow at both ends. exponential: by the same factor every step,
    start (end / start)^p. logarithmic: fast at first, start + (end - start) log(1 + 9 p) / log 10.
    """
    p = min(max(progress, 0.0), 1.0)
    if kind == "constant":
        return start
    if kind == "exponential" and not (start > 0 and end > 0):
        raise ValueError(
            f"An exponential schedule from {start:g} to {end:g} is none: both ends must be greater than 0; "
            "take linear, or an end such as 1e-6."
        )
    if p in (0, 1):
        return end if p else start
    if kind == "exponential":
        now = start * (end / start) ** p
    else:
        share = {"linear": p, "cosine": (1 - math.cos(math.pi * p)) / 2, "logarithmic": math.log10(1 + 9 * p)}
        now = start + (end - start) * share[kind]
    # Rounding leads out of the ends by a last digit.
    return min(max(now, min(start, end)), max(start, end))


def knobs_at(config: Config, progress: float) -> Trainer:
    """Say what the knobs of the loop are after a share of the run."""
    numbers = {
        each.key: scheduled(each.kind, scheduled_from(config.trainer, each), each.end, progress)
        for each in config.schedule
    }
    return with_numbers(config.trainer, numbers)
