"""The same bench in several fresh processes: what one of them does may be chance of where its memory lies."""

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
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from holdfast.cli import main; sys.exit(main())"
)
"""A terminal's Ctrl-C reaches all at once: who started it says so, and ends it."""
MEASURED, WRONG_CALL = (0, 1), 2
"""Exit codes: all was measured, right or wrong; what was asked for cannot be."""
SIZES = ("cell", "hidden", "batch", "steps", "layers", "starts")


def in_processes(
    words: Sequence[str], number: int, cases: int, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """Call `holdfast bench memory` with these words so many times; give what each has written as it ends."""
    with tempfile.TemporaryDirectory() as folder:
        for each in range(number):
            say(f"process {each + 1} of {number}")
            file = Path(folder) / f"{each}.json"
            command = [sys.executable, "-c", START, "bench", "memory", *words, "--json", str(file)]
            # Its lines are heard as they come; its table is not needed.
            ended = subprocess.run(command, stdout=subprocess.DEVNULL)
            run = _written(file)
            if ended.returncode not in MEASURED or len(run["cases"]) < cases:
                kind = ConfigError if ended.returncode == WRONG_CALL else ContractError
                raise kind(
                    f"Process {each + 1} of {number} ended with {ended.returncode} after "
                    f"{len(run['cases'])} of {cases} cases; it is not counted. "
                    "Without --processes one sees where it ends."
                )
            yield run


def _written(file: Path) -> dict[str, Any]:
    """Read what a process wrote; one that died may have written nothing, or half of it."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return {"cases": []}


def combined(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put what several processes found side by side: the median of medians, the least and the most.

    A rival is right if it was right in all of them.
    """
    gathered: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        for case in run["cases"]:
            for result in case["results"]:
                key = (*(case[size] for size in SIZES), result["rival"], result["precision"])
                gathered.setdefault(key, []).append(result)
    return [
        {
            **dict(zip((*SIZES, "rival", "precision"), key, strict=True)),
            **_over(results, "ms_median"),
            **_over(results, "of_dense"),
            "right": all(result["right"] for result in results),
            "processes": len(results),
        }
        for key, results in gathered.items()
    ]


def _over(results: Sequence[dict[str, Any]], name: str) -> dict[str, float | None]:
    numbers = [result[name] for result in results if result[name] is not None]
    if not numbers:
        return dict.fromkeys((name, f"{name}_least", f"{name}_most"))
    return {
        name: statistics.median(numbers),
        f"{name}_least": min(numbers),
        f"{name}_most": max(numbers),
    }
