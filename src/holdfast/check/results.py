"""What a check found: a measurement a law, its bound, and what is wrong where it is broken."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Sense = Literal["at most", "more than"]


@dataclass(frozen=True)
class Measurement:
    """One number held against one bound."""

    what: str
    measured: float
    bound: float
    sense: Sense = "at most"
    finding: str = ""
    """Where it is worst, told only if it is out of bounds."""

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
class Law:
    """A law's verdict: all its measurements, and the one that comes closest to breaking it."""

    name: str
    parts: Sequence[Measurement]
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
        """What is wrong and where; empty if nothing is."""
        return "; ".join(f"{part.what}: {part.finding}" for part in self.parts if not part.ok)


class Laws(Mapping[str, Law]):
    """The verdicts on one policy: `laws.ok`, `laws["replay"].measured`."""

    def __init__(self, laws: Sequence[Law]) -> None:
        self._laws = {law.name: law for law in laws}

    def __getitem__(self, name: str) -> Law:
        return self._laws[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._laws)

    def __len__(self) -> int:
        return len(self._laws)

    @property
    def ok(self) -> bool:
        """Whether every law holds."""
        return all(law.ok for law in self._laws.values())

    def as_json(self) -> dict[str, object]:
        """Put the verdicts into plain values."""
        return {
            "ok": self.ok,
            "laws": {
                name: {
                    "measured": law.measured,
                    "bound": law.bound,
                    "ok": law.ok,
                    "finding": law.finding,
                    "parts": [
                        {
                            "what": part.what,
                            "measured": part.measured,
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
