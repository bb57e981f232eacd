"""Scores: the mean and the interquartile mean of returns, and how far chance may have moved them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import ContractError
from holdfast.shapes import Float, Tensor

RESAMPLES = 2000
"""How often an interval is drawn anew: its ends are then known to a twentieth of its width."""
AT_ONCE = 100
"""Resamples computed at once, so that many episodes fit into memory."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Score:
    """The mean of returns and that of their middle half, each with a 95 % interval."""

    mean: float
    mean_ci95: Interval
    iqm: float
    iqm_ci95: Interval


def score(samples: Sequence[Float[Tensor, "_ _"]], seed: int = 0) -> Score:
    """Sum up returns: one sample for each seed that was played, a row for those who lived together.

    The intervals are percentiles of the bootstrap. Each seed is drawn from itself (its number of episodes
    is no chance), and those who shared a place are drawn as one (they felt each other). A seed with one place
    only has nothing to draw from; then all seeds are drawn from together.
    """
    tables = [sample.double().cpu().numpy() for sample in samples]
    if min(map(len, tables)) < 2:
        widths = sorted({table.shape[1] for table in tables})
        tables = [np.concatenate([each for each in tables if each.shape[1] == width]) for width in widths]
    if min(map(len, tables)) < 2:
        raise ContractError("An interval needs episodes in two places at least; play more of them.")
    whole = np.concatenate([table.ravel() for table in tables])
    found = [(float(of(whole)), _interval(tables, of, seed)) for of in (_mean, _iqm)]
    (mean, mean_ci95), (iqm, iqm_ci95) = found
    return Score(mean, mean_ci95, iqm, iqm_ci95)


def _mean(returns: Any) -> Any:
    return returns.mean(-1)


def _iqm(returns: Any) -> Any:
    """Leave out a quarter, rounded down, at each end."""
    # It takes a second to import.
    from scipy import stats

    return stats.trim_mean(returns, 0.25, axis=-1)


def _interval(tables: list[Any], of: Any, seed: int) -> Interval:
    """Draw places anew, with all that was lived there, and see how far the score moves."""
    from scipy import stats

    def drawn(*rows: Any, axis: int) -> Any:
        lived = (table[each].reshape(*each.shape[:-1], -1) for table, each in zip(tables, rows, strict=True))
        return of(np.concatenate(list(lived), axis=axis))

    found = stats.bootstrap(
        [np.arange(len(table)) for table in tables],
        drawn,
        n_resamples=RESAMPLES,
        batch=AT_ONCE,
        confidence_level=0.95,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(seed),
    )
    return float(found.confidence_interval.low), float(found.confidence_interval.high)
