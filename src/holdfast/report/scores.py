"""Evaluations in words: a table for people, and JSON for programs."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from rich.table import Column, Table
from rich.text import Text

from holdfast.experience import Score
from holdfast.worlds import WorldSpec


@runtime_checkable
class Scored(Protocol):
    """Episodes that were summed up."""

    @property
    def returns(self) -> Score:
        """What they returned."""
        ...

    @property
    def length_mean(self) -> float:
        """How long they were."""
        ...


def score_table(first: str, rows: Sequence[tuple[str, Scored]]) -> Table:
    """Tabulate scores and mean lengths by what they are of."""
    numbers = ("return", "95 %", "middle half", "95 %", "length")
    table = Table(
        first,
        *(Column(name, justify="right") for name in numbers),
        box=None,
        padding=(0, 3, 0, 0),
        pad_edge=False,
    )
    for name, row in rows:
        found = row.returns
        means = f"{found.mean:.3f}", _from_to(found.mean_ci95), f"{found.iqm:.3f}", _from_to(found.iqm_ci95)
        table.add_row(Text(name), *means, f"{row.length_mean:.1f}")
    return table


def lead_line(lead: Score) -> str:
    """Say by how much one did better than the other, and whether chance explains it."""
    low, high = lead.mean_ci95
    told = "this one is better" if low > 0 else "the other is better" if high < 0 else "chance explains it"
    return f"difference {lead.mean:+.3f}, from {low:+.3f} to {high:+.3f}: {told}"


def score_json(found: Score, prefix: str = "") -> dict[str, Any]:
    """Write a score for programs."""
    return {
        f"{prefix}return_mean": found.mean,
        f"{prefix}return_ci95": list(found.mean_ci95),
        f"{prefix}return_iqm": found.iqm,
        f"{prefix}return_iqm_ci95": list(found.iqm_ci95),
    }


def bests(spec: WorldSpec) -> str:
    """Say what the best return is with and without memory, where a world knows."""
    known = {
        "the best there is": spec.best_return,
        "the best without memory": spec.best_return_without_memory,
    }
    return " · ".join(f"{name} {best:.3f}" for name, best in known.items() if best is not None)


def _from_to(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"
