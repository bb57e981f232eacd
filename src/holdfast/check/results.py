"""What a check found: a measurement a law, its bound, and what is wrong where it is broken."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from holdfast.shapes import Bool, Float, Tensor

Sense = Literal["at most", "more than"]


@dataclass(frozen=True)
class Measurement:
    """One number held against one bound."""

    what: str
    measured: float
    bound: float
    sense: Sense = "at most"
    finding: str = ""
    """Where it is first out of bounds, told only if it is."""
    about: str = ""
    """Which experiment it comes from, in one word, for whoever looks for the cause."""

    @property
    def ok(self) -> bool:
        """Whether the number is within its bound; NaN never is."""
        if self.sense == "more than":
            return self.measured > self.bound
        return self.measured <= self.bound

    @property
    def strain(self) -> float:
        """How close to its bound, to find the one worth showing."""
        if self.sense == "more than":
            return self.bound / self.measured if self.measured > 0 else float("inf")
        if self.bound == 0:
            return 0.0 if self.measured == 0 else float("inf")
        return self.measured / self.bound


@dataclass(frozen=True)
class Pattern:
    """A way to be wrong that explains what was measured."""

    name: str
    write: str
    """What to write to mend it."""


@dataclass(frozen=True)
class Law:
    """A law's verdict: all its measurements, and the one that comes closest to breaking it."""

    name: str
    parts: Sequence[Measurement]
    pattern: Pattern | None = None
    """What explains a broken law; none if it holds or if nothing known explains it."""
    sought: bool = True
    """Whether there are patterns that could explain it."""
    worst: Measurement = field(init=False)

    def __post_init__(self) -> None:
        broken = [part for part in self.parts if not part.ok]
        object.__setattr__(self, "worst", max(broken or self.parts, key=lambda part: part.strain))

    @property
    def ok(self) -> bool:
        """Whether every measurement is within its bound."""
        return all(part.ok for part in self.parts)

    @property
    def measured(self) -> float:
        """The number that comes closest to breaking the law."""
        return self.worst.measured

    @property
    def bound(self) -> float:
        """The bound of that number."""
        return self.worst.bound

    @property
    def finding(self) -> str:
        """What is wrong and where, what explains it and what to write; empty if nothing is wrong.

        Where a law could not be measured, it says what to do about it.
        """
        if self.ok:
            return self.worst.finding if self.worst.about == "n/a" else ""
        if not self.sought:
            return f"{self.where}."
        if self.pattern is None:
            return f"{self.where}. No known pattern explains these numbers."
        return f"{self.where}. Pattern: {self.pattern.name}. Write: {self.pattern.write}"

    @property
    def where(self) -> str:
        """The first measurement that is out of bounds, and how many more are."""
        broken = [part for part in self.parts if not part.ok]
        if not broken:
            return ""
        rest = f" ({len(broken) - 1} more like it)" if len(broken) > 1 else ""
        return f"{broken[0].what}: {broken[0].finding}{rest}"


@dataclass(frozen=True)
class Reach:
    """Who feels what: how much is felt at each step `[seen, agent, felt]` of what was seen at each."""

    lived: Float[Tensor, "N A N"]
    replayed: Float[Tensor, "N A N"]
    gradient: Float[Tensor, "N A N"]
    """How strongly what is said at each step pulls on what was seen, in replayed segments."""
    clears: Bool[Tensor, "A N"]
    """Where memory must be emptied."""
    valid: Bool[Tensor, "A N"]
    """Where somebody acts."""
    horizon: int
    """How many steps a segment has."""


class Laws(Mapping[str, Law]):
    """The verdicts on one policy or world: `laws.ok`, `laws["replay"].measured`."""

    def __init__(
        self,
        laws: Sequence[Law],
        *,
        notes: Sequence[str] = (),
        reach: Reach | None = None,
        of: str = "memory",
    ) -> None:
        self._laws = {law.name: law for law in laws}
        self.of = of
        """What these are the laws of."""
        self.notes = tuple(notes)
        """What could not be measured, and why."""
        self.reach = reach
        """The arrays that carry, clear and cut were judged on, if they were measured."""

    def __getitem__(self, name: str) -> Law:
        return self._laws[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._laws)

    def __len__(self) -> int:
        return len(self._laws)

    def __repr__(self) -> str:
        lines = (f"{name}: {'holds' if law.ok else law.finding}" for name, law in self.items())
        return "\n".join(lines)

    @property
    def ok(self) -> bool:
        """Whether every law holds."""
        return all(law.ok for law in self._laws.values())

    def as_json(self) -> dict[str, object]:
        """Put the verdicts into plain values."""
        return {
            "ok": self.ok,
            "notes": list(self.notes),
            "laws": {
                name: {
                    "measured": None if law.worst.about == "n/a" else _plain(law.measured),
                    "bound": law.bound,
                    "sense": law.worst.sense,
                    "ok": law.ok,
                    "finding": law.finding,
                    "pattern": None if law.pattern is None else law.pattern.name,
                    "write": None if law.pattern is None else law.pattern.write,
                    "parts": [
                        {
                            "what": part.what,
                            "measured": _plain(part.measured),
                            "bound": part.bound,
                            "sense": part.sense,
                            "ok": part.ok,
                        }
                        for part in law.parts
                    ],
                }
                for name, law in self._laws.items()
            },
        }


def _plain(number: float) -> float | None:
    """Write what is no finite number as nothing: JSON has no word for it."""
    return number if math.isfinite(number) else None
