"""Scores: mean and interquartile mean of returns, with bootstrap confidence intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.errors import ContractError
from holdfast.types import Float, Tensor

RESAMPLES = 2000
"""Bootstrap resamples: they give the ends of an interval to a twentieth of its width."""
RESAMPLE_BATCH = 100
"""Resamples per batch, so that many episodes fit into memory."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Score:
    """Mean and interquartile mean (IQM) of returns, each with a 95 % confidence interval."""

    mean: float
    mean_ci95: Interval
    iqm: float
    iqm_ci95: Interval


def score(samples: Sequence[Float[Tensor, "_ _"]]) -> Score:
    """Score returns: one sample per seed, with one row per group of episodes that shared an environment.

    The intervals are bootstrap percentiles. Resampling is stratified by seed (the number of episodes of a
    seed is not random), and rows are drawn as a unit (their episodes are correlated). A seed with a single
    row cannot be resampled; then all seeds form one stratum.
    """
    tables = [sample.double().cpu().numpy() for sample in samples]
    if min(map(len, tables)) < 2:
        widths = sorted({table.shape[1] for table in tables})
        tables = [np.concatenate([table for table in tables if table.shape[1] == width]) for width in widths]
    if min(map(len, tables)) < 2:
        raise ContractError("A confidence interval needs episodes of at least two environments; play more episodes.")
    returns = np.concatenate([table.ravel() for table in tables])
    return Score(float(_mean(returns)), _interval(tables, _mean), float(_iqm(returns)), _interval(tables, _iqm))


def interquartile_mean(returns: Sequence[float]) -> float:
    """Return the mean of the middle half: a quarter of the numbers, rounded down, is trimmed at each end."""
    return float(_iqm(np.asarray(returns, dtype=np.float64)))


def _mean(returns: Any) -> Any:
    return returns.mean(-1)


def _iqm(returns: Any) -> Any:
    # Imported here: it takes a second.
    from scipy import stats

    return stats.trim_mean(returns, 0.25, axis=-1)


def _interval(tables: list[Any], of: Any) -> Interval:
    """Bootstrap confidence interval of a statistic, resampling rows."""
    from scipy import stats

    def statistic(*indices: Any, axis: int) -> Any:
        pairs = zip(tables, indices, strict=True)
        resampled = [table[index].reshape(*index.shape[:-1], -1) for table, index in pairs]
        return of(np.concatenate(resampled, axis=axis))

    result = stats.bootstrap(
        [np.arange(len(table)) for table in tables],
        statistic,
        n_resamples=RESAMPLES,
        batch=RESAMPLE_BATCH,
        confidence_level=0.95,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)
