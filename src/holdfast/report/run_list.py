"""The runs of a folder: world, policy, steps, return, last change, and whether they are finished."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from holdfast.report import SEEDS
from holdfast.report.metrics import read_lines

RETURNS = ("eval/return_mean", "charts/episodic_return")
"""Metrics that may be a run's return, the best one first."""


@dataclass(frozen=True)
class RunSummary:
    """One row of the list; None: unknown, because a file is missing or cannot be read."""

    name: str
    world: str | None
    policy: str | None
    seed: int | None
    steps: int | None
    """Agent steps so far."""
    episodic_return: float | None
    """The greedy return of the newest evaluation, or else that of the newest training episodes."""
    updated: str
    """When metrics or config were last written: local time, in ISO format."""
    finished: bool | None

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        return asdict(self)


def list_runs(folder: Path) -> Iterator[RunSummary]:
    """Yield the runs of a folder by name; configs are read as data, and no code that they name is imported."""
    for path in sorted(folder.iterdir()):
        if (path / "config.json").is_file():
            yield _summary(path)
        elif (path / SEEDS).is_file():
            for run in list_runs(path):
                yield replace(run, name=f"{path.name}/{run.name}")


def _summary(path: Path) -> RunSummary:
    config = _read_json(path / "config.json")
    file = path / "metrics.jsonl"
    lines = read_lines(file) if file.is_file() else []
    newest = dict[str, int | float]()
    for line in lines:
        newest.update(line)
    returns = [float(newest[name]) for name in RETURNS if name in newest]
    steps, iteration = newest.get("global_step"), newest.get("iteration")
    planned = _iterations(config)
    return RunSummary(
        name=path.name,
        world=_field(config, str, "world", "name"),
        policy=_field(config, str, "policy", "name"),
        seed=_field(config, int, "seed"),
        steps=None if steps is None else int(steps),
        episodic_return=returns[0] if returns else None,
        updated=_updated(path),
        finished=None if planned is None else iteration is not None and iteration >= planned,
    )


def _updated(path: Path) -> str:
    files = (path / "config.json", path / "metrics.jsonl")
    newest = max(file.stat().st_mtime for file in files if file.is_file())
    return datetime.fromtimestamp(newest).isoformat(timespec="seconds")


def _iterations(config: Any) -> int | None:
    total, batch = (_field(config, int, "trainer", key) for key in ("total_timesteps", "batch_size"))
    if total is None or batch is None or batch < 1:
        return None
    return -(-total // batch)


def _read_json(file: Path) -> Any:
    """Return the values of a file, or None if it cannot be read."""
    try:
        return json.loads(file.read_text(errors="replace")) if file.is_file() else None
    except (ValueError, RecursionError, OSError):
        return None


def _field(tree: Any, kind: type, *names: str) -> Any:
    """Return a nested field, or None if it is missing or of another type."""
    for name in names:
        tree = tree.get(name) if isinstance(tree, dict) else None
    is_kind = isinstance(tree, kind) and not isinstance(tree, bool)
    return tree if is_kind and not (isinstance(tree, float) and not math.isfinite(tree)) else None
