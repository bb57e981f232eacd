"""The benchmark in several fresh processes: timings of one depend on where its memory lies."""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, ContractError

START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from holdfast.cli import main; sys.exit(main())"
)
"""Ctrl-C reaches all processes of a terminal: only the parent handles it."""
MEASURED, USAGE_ERROR = (0, 1), 2
"""Exit codes: measured, correct or not; usage error."""
SIZES = ("cell", "hidden", "batch", "steps", "layers", "starts")


def in_processes(args: Sequence[str], count: int, cases: int, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Run `holdfast bench memory` in `count` processes; yield the JSON of each as it ends."""
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            log(f"process {index + 1} of {count}")
            file = Path(folder) / f"{index}.json"
            command = [sys.executable, "-c", START, "bench", "memory", *args, "--json", str(file)]
            # Its stderr is passed through; its table is not needed.
            process = subprocess.run(command, stdout=subprocess.DEVNULL)
            run = _read_json(file)
            if process.returncode not in MEASURED or len(run["cases"]) < cases:
                kind = ConfigError if process.returncode == USAGE_ERROR else ContractError
                raise kind(
                    f"Process {index + 1} of {count} exited with {process.returncode} after "
                    f"{len(run['cases'])} of {cases} cases; it is not counted. "
                    "Run without --processes to see the error."
                )
            yield run


def _read_json(file: Path) -> dict[str, Any]:
    """Read the JSON of a process; one that crashed may have written none or half of it."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {"cases": []}


def combined(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Combine processes: the median, minimum and maximum of their medians; right: right in all of them."""
    by_implementation: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        for case in run["cases"]:
            for result in case["results"]:
                key = (*(case[size] for size in SIZES), result["implementation"], result["precision"])
                by_implementation.setdefault(key, []).append(result)
    return [
        {
            **dict(zip((*SIZES, "implementation", "precision"), key, strict=True)),
            **_over(results, "ms_median"),
            **_over(results, "of_dense"),
            "right": all(result["right"] for result in results),
            "processes": len(results),
        }
        for key, results in by_implementation.items()
    ]


def _over(results: Sequence[dict[str, Any]], name: str) -> dict[str, float | None]:
    numbers = [result[name] for result in results if result[name] is not None]
    if not numbers:
        return dict.fromkeys((name, f"{name}_least", f"{name}_most"))
    return {name: statistics.median(numbers), f"{name}_least": min(numbers), f"{name}_most": max(numbers)}
