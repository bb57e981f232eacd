"""`metrics.jsonl`, the truth of a run, and `machine.jsonl` beside it for what the machine decides."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from holdfast.errors import ContractError
from holdfast.report.metrics import METRICS, described

MACHINE = "machine.jsonl"
WHEN = ("iteration", "global_step")
"""What a line of the machine's repeats, so that it can be laid beside the run's."""


class MetricsFile:
    """Takes one line an update, written through at once.

    Two runs of one seed have equal files but for the times in them; what depends on the machine lies apart.
    """

    def __init__(self, path: Path) -> None:
        self._machine_path = path.with_name(MACHINE)
        self._machine: TextIO | None = None
        self._file = path.open("a", buffering=1)

    def write(self, metrics: Mapping[str, int | float]) -> None:
        """Append one line; a number nobody described, or one that is none, is refused."""
        require_described(metrics)
        machine = {name for name in metrics if METRICS[name.partition("@")[0]].kind == "machine"}
        rest = {name: number for name, number in metrics.items() if name not in machine}
        self._append(self._file, rest)
        if machine:
            if self._machine is None:
                self._machine = self._machine_path.open("a", buffering=1)
            told = {name: number for name, number in metrics.items() if name in machine or name in WHEN}
            self._append(self._machine, told)

    def _append(self, file: TextIO, numbers: Mapping[str, int | float]) -> None:
        line = json.dumps(numbers, allow_nan=False) + "\n"
        try:
            file.write(line)
        except OSError as error:
            raise OSError(f"Could not write {file.name}: {error.strerror or error}.") from error

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._machine is not None:
            self._machine.close()


def require_described(metrics: Mapping[str, int | float]) -> None:
    """Refuse numbers that nobody described, and what is not a finite number."""
    unknown = sorted(name for name in metrics if described(name) is None)
    if unknown:
        raise ContractError(f"{unknown} are not in the metrics dictionary; describe them there.")
    for name, number in metrics.items():
        if not math.isfinite(number):
            raise ContractError(
                f"{name} is {number} at iteration {metrics.get('iteration', '?')}; it must be a finite "
                "number. Leave out what was not measured."
            )
