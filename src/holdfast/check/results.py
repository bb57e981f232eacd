"""Results of a check: measurements with bounds, grouped by law, and the known bug behind a broken one."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from holdfast.types import Bool, Float, Tensor


@dataclass(frozen=True)
class Measurement:
    """One number and its bound."""

    what: str
    measured: float
    bound: float = 0.0
    comparison: Literal["at most", "more than"] = "at most"
    finding: str = ""
    """Where the number first exceeds its bound; shown only if it does."""
    path: str = ""
    """The experiment it comes from, for the diagnosis."""
    required: bool = False
    """Whether it had to be measured and was not: no pass."""

    @property
    def ok(self) -> bool:
        """Whether the number is within its bound; NaN never is."""
        if self.required:
            return False
        if self.comparison == "more than":
            return self.measured > self.bound
        return self.measured <= self.bound

    @property
    def margin(self) -> float:
        """Distance to the bound, as a ratio: the largest is shown."""
        if self.comparison == "more than":
            return self.bound / self.measured if self.measured > 0 else float("inf")
        if self.bound == 0:
            return 0.0 if self.measured == 0 else float("inf")
        return self.measured / self.bound

    def as_json(self) -> dict[str, object]:
        """Return what was measured and its bound as JSON values."""
        numbers = {"what": self.what, "measured": _finite(self.measured), "bound": self.bound}
        return {**numbers, "sense": self.comparison, "ok": self.ok}


def not_measured(what: str, advice: str = "") -> Measurement:
    """Return a measurement that could not be made, with advice on how to make it."""
    return Measurement(what, 0.0, finding=advice, path="n/a")


@dataclass(frozen=True)
class Pattern:
    """A known bug that explains the measurements."""

    name: str
    write: str
    """The fix, in one sentence."""
    detail: str = ""
    """What else is known: which part of the state, which rows."""
    explained: float | None = None
    """The share of the differing segments that it explains; None if it was found otherwise."""

    @property
    def fit(self) -> str:
        """How well it fits, in brackets."""
        share = None if self.explained is None else f"explains {self.explained:.0%} of the differing segments"
        words = "; ".join(filter(None, (self.detail, share)))
        return f" ({words})" if words else ""


@dataclass(frozen=True)
class Law:
    """All measurements of one law, and the one closest to its bound."""

    name: str
    parts: Sequence[Measurement]
    pattern: Pattern | None = None
    """The known bug behind a broken law; None if the law holds or no known bug explains it."""
    diagnosed: bool = True
    """Whether there are known bugs to look for."""

    @cached_property
    def worst(self) -> Measurement:
        """The measurement closest to its bound, or furthest beyond it."""
        return max(self.broken or self.parts, key=lambda part: part.margin)

    @property
    def broken(self) -> list[Measurement]:
        """The measurements that exceed their bounds."""
        return [part for part in self.parts if not part.ok]

    @property
    def ok(self) -> bool:
        """Whether every measurement is within its bound."""
        return not self.broken

    @property
    def is_measured(self) -> bool:
        """Whether there was anything to measure."""
        return self.worst.path != "n/a"

    @property
    def measured(self) -> float:
        """The number closest to breaking the law."""
        return self.worst.measured

    @property
    def bound(self) -> float:
        """The bound of that number."""
        return self.worst.bound

    @property
    def finding(self) -> str:
        """The failure, its location, the known bug and the fix; for an unmeasured law, how to measure it."""
        if self.ok:
            return "" if self.is_measured else self.worst.finding
        if not self.is_measured:
            return self.where
        if self.pattern is not None:
            return f"{self.where}. Pattern: {self.pattern.name}{self.pattern.fit}. Write: {self.pattern.write}"
        return f"{self.where}.{' No known pattern explains these numbers.' if self.diagnosed else ''}"

    @property
    def where(self) -> str:
        """The first measurement that exceeds its bound, and how many more do."""
        if self.ok:
            return ""
        first, *rest = self.broken
        return f"{first.what}: {first.finding}{f' ({len(rest)} more like it)' if rest else ''}"


@dataclass(frozen=True)
class Reach:
    """How much each step's outputs change with each step's observation, `[input, agent, output]`."""

    rollout: Float[Tensor, "N A N"]
    replay: Float[Tensor, "N A N"]
    gradient: Float[Tensor, "N A N"]
    """Gradient of each step's outputs with respect to each step's observation, in replayed segments."""
    clears: Bool[Tensor, "A N"]
    """Where the state must be cleared."""
    valid: Bool[Tensor, "A N"]
    horizon: int
    """Steps of a segment."""


class Laws(Mapping[str, Law]):
    """The laws measured on one policy or world: `laws.ok`, `laws["replay"].measured`."""

    def __init__(
        self, laws: Sequence[Law], *, notes: Sequence[str] = (), reach: Reach | None = None, of: str = "memory"
    ) -> None:
        self._laws = {law.name: law for law in laws}
        self.of = of
        """What was checked: memory, or a world."""
        self.notes = tuple(notes)
        """What was assumed or could not be measured, and why."""
        self.reach = reach
        """The arrays behind carry, clear and cut, if they were measured."""

    def __getitem__(self, name: str) -> Law:
        return self._laws[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._laws)

    def __len__(self) -> int:
        return len(self._laws)

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {'holds' if law.ok else law.finding}" for name, law in self.items())

    @property
    def ok(self) -> bool:
        """Whether every law holds."""
        return all(law.ok for law in self._laws.values())

    def as_json(self) -> dict[str, object]:
        """Return all results as JSON values."""
        laws = {
            name: {
                "measured": _finite(law.measured) if law.is_measured else None,
                "bound": law.bound,
                "sense": law.worst.comparison,
                "ok": law.ok,
                "finding": law.finding,
                "pattern": law.pattern and law.pattern.name,
                "write": law.pattern and law.pattern.write,
                "detail": law.pattern and law.pattern.fit.strip(" ()"),
                "parts": [part.as_json() for part in law.parts],
            }
            for name, law in self.items()
        }
        return {"ok": self.ok, "notes": list(self.notes), "laws": laws}


def _finite(number: float) -> float | None:
    """Replace NaN and infinity by None, because JSON has neither."""
    return number if math.isfinite(number) else None
