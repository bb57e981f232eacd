"""What the minibatches of an update report, put together."""

from collections.abc import Mapping, Sequence

import torch

from holdfast.shapes import Tensor

WORST = ("ratio_error", "value_error")
"""Of these the largest counts, of all others the mean."""


def joined(reports: Sequence[Mapping[str, Tensor]], shares: Sequence[Tensor]) -> dict[str, Tensor]:
    """Join the reports of the pieces of a minibatch, each by its share of the steps."""
    if len(reports) == 1:
        return dict(reports[0])
    weight = torch.stack(list(shares))
    found = {}
    for name in reports[0]:
        parts = torch.stack([report[name] for report in reports])
        found[name] = parts.max() if name in WORST else (parts * weight.to(parts.dtype)).sum()
    return found


class Reports:
    """Gathers reports where they lie; the host waits for them once, when they are told."""

    def __init__(self) -> None:
        self._all: list[dict[str, Tensor]] = []
        self._epoch = 0

    def add(self, report: dict[str, Tensor]) -> None:
        """Add the report of a minibatch."""
        self._all.append(report)

    def end_epoch(self) -> float:
        """Return how far the policy had moved in the epoch that ends: its mean `losses/approx_kl`."""
        latest, self._epoch = self._all[self._epoch :], len(self._all)
        return float(torch.stack([report["losses/approx_kl"] for report in latest]).mean())

    def told(self) -> dict[str, float]:
        """Tell the means over all minibatches, and how far the first was from what was lived."""
        first = self._all[0]
        means = {name: float(torch.stack([report[name] for report in self._all]).mean()) for name in first}
        return {
            **{name: mean for name, mean in means.items() if name not in WORST},
            "charts/gradient_steps": len(self._all),
            "memory/replay_error": float(first["ratio_error"]),
            "memory/replay_value_error": float(first["value_error"]),
        }
