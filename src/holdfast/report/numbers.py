"""Numbers as a person reads them: short, with their unit, and as a line of little bars."""

import math
from collections.abc import Sequence
from itertools import pairwise

BARS = "▁▂▃▄▅▆▇█"
KEPT = 256
"""How many points of a run's course are kept; twice as many are averaged in pairs."""


def short(number: int | float, digits: int = 2) -> str:
    """Write a number with some digits that count: 3e-7, 0.04, 6.1, 903, 12,345."""
    size = abs(number)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        mantissa, _, exponent = f"{number:.{digits - 2}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def bytes_in_words(count: int | float) -> str:
    """Write a number of bytes with a fitting unit."""
    size, sign = abs(count), "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{sign}{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.1f} TiB"


def clock(seconds: int | float) -> str:
    """Write a time as 0:42, 12:05 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Course:
    """The course of a number over a run, in bounded room: always from its beginning to now."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0

    def add(self, number: int | float) -> None:
        """Take the next number."""
        self._sum, self._count = self._sum + number, self._count + 1
        if self._count == self._each:
            self.points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.points) >= 2 * KEPT:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._each *= 2


def spark(points: Sequence[int | float], width: int) -> str:
    """Draw the course of a number as little bars, the lowest of them its least."""
    if not points or width < 1:
        return ""
    columns = min(width, len(points))
    edges = [round(column * len(points) / columns) for column in range(columns + 1)]
    means = [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(BARS[round((mean - low) / span * 7) if span > 0 else 0] for mean in means)
