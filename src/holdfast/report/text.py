"""Numbers, configs and evaluation results as text."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from rich.table import Column, Table
from rich.text import Text
from torch import nn

from holdfast.config.run import Config, all_keys, format_value, lookup
from holdfast.evaluation.held_out import EvalResult
from holdfast.evaluation.score import Score
from holdfast.worlds import WorldSpec

BARS = "▁▂▃▄▅▆▇█"
WHERE = ("run", "runs_dir")
"""Keys that say where a run lies, not what it trains."""
MAX_POINTS = 256
"""Points of a curve; at twice as many, pairs are averaged."""


def short_number(number: int | float, digits: int = 2) -> str:
    """Format a number with significant digits: 3e-7, 0.04, 6.1, 903, 12,345."""
    size = abs(number)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e7:
        mantissa, _, exponent = f"{number:.{digits - 2}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    text = f"{number:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def clock(seconds: int | float) -> str:
    """Format seconds as 0:42, 12:05 or 1:02:03."""
    minutes, secs = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


class RunningMeans:
    """Curve of a metric over the whole run in bounded memory, by averaging windows."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._window, self._sum, self._count = 1, 0.0, 0

    def add(self, number: int | float) -> None:
        """Add the next value."""
        self._sum, self._count = self._sum + number, self._count + 1
        if self._count == self._window:
            self.points.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0
        if len(self.points) >= 2 * MAX_POINTS:
            self.points = [(a + b) / 2 for a, b in zip(self.points[::2], self.points[1::2], strict=True)]
            self._window *= 2


def sparkline(points: Sequence[int | float], width: int) -> str:
    """Draw a curve as a sparkline, scaled from its minimum to its maximum."""
    if not points or width < 1:
        return ""
    columns = min(width, len(points))
    edges = [round(column * len(points) / columns) for column in range(columns + 1)]
    means = [sum(points[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = high - low
    return "".join(BARS[round((mean - low) / span * 7) if span > 0 else 0] for mean in means)


def title_of(config: Config, name: str, policy: nn.Module, device: torch.device) -> dict[str, str]:
    """Describe a run for the head of the dashboard."""
    size = sum(parameter.numel() for parameter in policy.parameters())
    return {
        "run": name,
        "world": f"{config.world.name}, {config.world.agents:,} agents",
        "policy": f"{config.policy.name}, {size:,} parameters",
        "device": str(device),
        "seed": f"seed {config.seed}",
    }


def config_difference(recipe: Config, config: Config, ignored: Sequence[str] = WHERE) -> Table | None:
    """Return a table of the keys that differ from the recipe, but for some; None: no key does."""
    columns = [Column(name, overflow="fold") for name in ("key", "recipe", "this run")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    recipe_keys = all_keys(recipe.world.name)
    for key, field in all_keys(config.world.name).items():
        if key in ignored:
            continue
        # The recipe's world may not have this key.
        old = lookup(recipe, key) if key in recipe_keys else field.get_default()
        new = lookup(config, key)
        if old != new:
            table.add_row(key, Text(format_value(old)), Text(format_value(new)))
    return table if table.row_count else None


def score_table(first: str, rows: Sequence[tuple[str, EvalResult]]) -> Table:
    """Return a table of scores and mean lengths, one row per name."""
    numbers = (Column(name, justify="right") for name in ("return", "95 %", "IQM", "95 %", "length"))
    table = Table(first, *numbers, box=None, padding=(0, 3, 0, 0), pad_edge=False)
    for name, row in rows:
        score = row.returns
        means = f"{score.mean:.3f}", _interval(score.mean_ci95), f"{score.iqm:.3f}", _interval(score.iqm_ci95)
        table.add_row(Text(name), *means, f"{row.length_mean:.1f}")
    return table


def margin_line(margin: Score) -> str:
    """Describe the difference of two policies and whether its confidence interval excludes 0."""
    low, high = margin.mean_ci95
    verdict = "this one is better" if low > 0 else "the other is better" if high < 0 else "not significant"
    return f"difference {margin.mean:+.3f}, 95 % interval {low:+.3f} to {high:+.3f}: {verdict}"


def score_json(score: Score, prefix: str = "") -> dict[str, Any]:
    """Return a score as JSON."""
    return {
        f"{prefix}return_mean": score.mean,
        f"{prefix}return_ci95": list(score.mean_ci95),
        f"{prefix}return_iqm": score.iqm,
        f"{prefix}return_iqm_ci95": list(score.iqm_ci95),
    }


def best_returns_line(spec: WorldSpec) -> str:
    """Describe the best possible returns with and without memory, where the world declares them."""
    returns = {"best possible return": spec.best_return, "without memory": spec.best_return_without_memory}
    return " · ".join(f"{name} {best:.3f}" for name, best in returns.items() if best is not None)


def _interval(interval: tuple[float, float]) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}"
