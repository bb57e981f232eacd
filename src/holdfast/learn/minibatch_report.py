"""The metrics of minibatches: on the device, and averaged."""

from collections.abc import Mapping, Sequence

import torch

from holdfast import ranks
from holdfast.types import Float, Tensor

MAX_METRICS = ("ratio_error", "value_error")
"""Metrics whose maximum counts; of all others it is the mean."""


class MinibatchReport:
    """The metrics of a minibatch, on the device: one tensor, so that the host reads all of them at once."""

    def __init__(self, names: Sequence[str], numbers: Float[Tensor, " names"]) -> None:
        self.names, self.numbers = names, numbers

    def __getitem__(self, name: str) -> Float[Tensor, ""]:
        """Return one metric."""
        return self.numbers[self.names.index(name)]


def weighted_mean(reports: Sequence[Mapping[str, Tensor]], shares: Sequence[Tensor]) -> dict[str, Tensor]:
    """Combine the metrics of micro-batches, weighted by their shares of the valid steps of all ranks."""
    if len(reports) == 1 and ranks.count() == 1:
        return dict(reports[0])
    weight = torch.stack(list(shares))
    metrics = {}
    for name in reports[0]:
        numbers = torch.stack([report[name] for report in reports])
        metrics[name] = numbers.max() if name in MAX_METRICS else (numbers * weight.to(numbers.dtype)).sum()
    return metrics


def sum_over_ranks(reports: Sequence[MinibatchReport]) -> Sequence[MinibatchReport]:
    """Add up the ranks' shares of the metrics of each minibatch, and take the largest of `MAX_METRICS`."""
    if ranks.count() == 1 or not reports:
        return reports
    rows, names = torch.stack([report.numbers.double() for report in reports]), reports[0].names
    highest = ranks.reduce(rows.clone(), "max")
    is_max = torch.tensor([name in MAX_METRICS for name in names], device=rows.device)
    rows = torch.where(is_max, highest, ranks.reduce(rows))
    return [MinibatchReport(names, row) for row in rows]


def mean_metrics(reports: Sequence[MinibatchReport]) -> dict[str, float]:
    """Return means over minibatches, and the replay errors of the first; the host waits for the device here."""
    if not reports:
        return {"charts/gradient_steps": 0.0}
    rows = torch.stack([report.numbers for report in reports])
    first, means = torch.stack([rows[0], rows.mean(0)]).tolist()
    names = reports[0].names
    metrics = {name: mean for name, mean in zip(names, means, strict=True) if name not in MAX_METRICS}
    errors = dict(zip(names, first, strict=True))
    return metrics | {
        "charts/gradient_steps": len(reports),
        "memory/replay_error": errors["ratio_error"],
        "memory/replay_value_error": errors["value_error"],
    }


def mean_of(reports: Sequence[MinibatchReport], name: str) -> float:
    """Return the mean of one metric; the host waits for the device here."""
    return float(torch.stack([report[name] for report in reports]).mean())
