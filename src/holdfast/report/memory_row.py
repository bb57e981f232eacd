"""The memory row: what a person wants to know of a run's memory, and what raises an alarm."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from holdfast.check.watch import REPLAY_ALARM
from holdfast.report.numbers import short

GRADIENT_ALARM = 1e3
"""A gradient longer than this, before clipping, is not healthy; nor is one of length 0."""

Numbers = Mapping[str, int | float]


class Cell(NamedTuple):
    """One thing of the row."""

    text: str
    ok: bool | None = None
    """Whether it is as it must be; none: there is nothing that it must be."""

    def __str__(self) -> str:
        return self.text if self.ok is None else f"{self.text} {'✓' if self.ok else '✗'}"


def replay_error(metrics: Numbers) -> float | None:
    """Take the larger of the two: a policy that says little moves its values before its ratio."""
    found = [
        metrics[name] for name in ("memory/replay_error", "memory/replay_value_error") if name in metrics
    ]
    return float(max(found)) if found else None


def memory_cells(metrics: Numbers, horizon: int, alarm_at: float = REPLAY_ALARM) -> Iterator[Cell]:
    """Tell the row; what was not measured is not told."""
    if "memory/resets" in metrics and "memory/resets_due" in metrics:
        done, due = metrics["memory/resets"], metrics["memory/resets_due"]
        yield Cell(f"resets {done:,.0f}/{due:,.0f}", done == due)
    error = replay_error(metrics)
    if error is not None:
        yield Cell(f"replay error {short(error)}", error <= alarm_at)
    if "memory/drift" in metrics:
        yield Cell(f"drift {short(metrics['memory/drift'])}")
    if "memory/gradient_reach" in metrics:
        of = f"/{horizon}" if horizon else ""
        yield Cell(f"grad reach {metrics['memory/gradient_reach']:.0f}{of}")
    if "memory/state_norm" in metrics:
        yield Cell(f"state norm {short(metrics['memory/state_norm'])}")
    if "memory/age_max" in metrics:
        yield Cell(f"age max {metrics['memory/age_max']:,.0f}")


def alarms(metrics: Numbers, alarm_at: float = REPLAY_ALARM) -> Iterator[tuple[str, str]]:
    """Tell what is wrong: of which kind it is, and a line."""
    error = replay_error(metrics)
    if error is not None and error > alarm_at:
        yield (
            "replay",
            f"replaying a segment differs from living it by {error:.1e}. The memory is wrong somewhere; run "
            "`holdfast check` on this policy.",
        )
    done, due = metrics.get("memory/resets"), metrics.get("memory/resets_due")
    if done is not None and due is not None and done != due:
        yield (
            "resets",
            f"the memory was cleared {done:,.0f} times where {due:,.0f} starts were due. Episodes leak into "
            "each other or are cut short; run `holdfast check` on this policy.",
        )
    norm = metrics.get("losses/grad_norm")
    if norm is not None and norm == 0:
        yield ("gradient", "the gradient is exactly 0: nothing is learnt. Look for a loss without a graph.")
    elif norm is not None and norm > GRADIENT_ALARM:
        yield (
            "gradient",
            f"the gradient is {short(float(norm))} long before clipping; below {GRADIENT_ALARM:,.0f} is "
            "healthy. Scale rewards down or lower trainer.optimizer.learning_rate.",
        )
