"""Which plans were chosen, for which chip and job; a checkpoint takes them along.

A run that is resumed must run its kernels as it did before: other plans round otherwise.
"""

from typing import Any

Choices = dict[str, dict[str, list[Any]]]
"""By chip and kernels, then by job: the numbers of a plan."""

NUMBERS = 6
"""Of a plan."""

_made: Choices = {}


def all_chosen() -> Choices:
    """Copy all that was chosen or adopted in this process."""
    return {place: dict(jobs) for place, jobs in _made.items()}


def adopt(told: Any) -> None:
    """Choose as another process did, on the same chip with the same kernels; nonsense is passed over."""
    for place, jobs in told.items() if isinstance(told, dict) else ():
        for job, plan in jobs.items() if isinstance(jobs, dict) else ():
            if isinstance(plan, list) and len(plan) == NUMBERS and all(type(each) is int for each in plan):
                _made.setdefault(place, {})[job] = list(plan)


def chosen(place: str, job: str) -> list[Any] | None:
    """Look up one choice."""
    return _made.get(place, {}).get(job)


def forget() -> None:
    """Begin anew."""
    _made.clear()
