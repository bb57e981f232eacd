"""RunResult: what `train` returns."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from holdfast.policies import LSTMWrapper
from holdfast.report.metrics import read_metrics
from holdfast.worlds import WorldSpec

SHOWN = {
    "charts/episodic_return": "training return",
    "eval/return_mean": "greedy return",
    "eval/sampled_return_mean": "sampled return",
    "eval/return_mean_memory_cleared": "with memory cleared every step",
}


@dataclass(frozen=True, repr=False)
class RunResult:
    """A run: its policy, its folder, and its metrics."""

    folder: Path
    checkpoint: Path | None
    """The newest checkpoint; none: no weights were finite."""
    policy: LSTMWrapper
    """The trained policy."""
    spec: WorldSpec
    summary: dict[str, int | float]
    """Metrics of the last iteration and of the final evaluation."""
    finished: bool
    """False if the run was stopped, by a signal or a callback."""
    report: Path | None = None
    """The page about this run; None: `report=off`, or it could not be written."""

    @cached_property
    def metrics(self) -> dict[str, np.ndarray]:
        """All metrics as arrays over iterations, those before a resume too; NaN: not measured in that iteration.

        `pandas.DataFrame(run.metrics)` is a table with a row per iteration.
        """
        return read_metrics(self.folder / "metrics.jsonl")

    def __repr__(self) -> str:
        """Name the folder, how far the run came, and its returns."""
        state, count = "finished" if self.finished else "stopped", self.summary["iteration"]
        iterations = f"{count:,} iteration{'s' * (count != 1)}"
        parts = [f"{state} after {iterations}, {self.summary['global_step']:,} steps"]
        parts += [f"{label} {self.summary[name]:.3f}" for name, label in SHOWN.items() if name in self.summary]
        return f"<run {self.folder}: {' · '.join(parts)}>"
