"""A run's folder read as data, for plots and reports: config, command, binned metrics; no code that it names runs."""

import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from holdfast.errors import ConfigError, one_line
from holdfast.monitor.timeline import Timeline, read_timeline

BINS = 300
"""Points of a curve: more iterations are averaged in so many groups of equal size."""
LARGEST = 1e30
"""Larger numbers are not drawn."""
MAX_ITERATION = 10**12
MAX_LINE = 1 << 20
"""Bytes of a line; a longer one is not read."""
PREFIXES = ("gradients/within@", "eval/")
NAMES = frozenset(
    (
        *("iteration", "global_step", "seconds", "charts/SPS", "charts/episodes", "charts/episodic_return"),
        *("charts/episodic_length", "memory/replay_error", "memory/replay_value_error", "memory/check_replay"),
        *("memory/check_clear", "memory/resets", "memory/resets_due", "memory/drift", "memory/stale_kl"),
        *("memory/gradient_reach", "memory/buffer_bytes", "memory/state_bytes", "memory/graph_bytes"),
        *("losses/approx_kl", "time/world", "time/forward", "time/copy", "time/rollout", "time/update", "time/other"),
    )
)
"""Metrics that a report shows, and prefixes of others."""


@runtime_checkable
class HasFolder(Protocol):
    """A run with a folder, as `holdfast.train` returns it."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...


@dataclass(frozen=True)
class RunData:
    """The files of a run."""

    folder: Path
    config: Any
    """The values of config.json, whatever they are; None: it cannot be read."""
    command: str
    metrics: Mapping[str, np.ndarray]
    """Metrics as arrays over iterations; NaN: not measured in that iteration."""
    problems: tuple[str, ...] = ()
    """What could not be read."""
    timeline: Timeline | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name or str(self.folder)

    def value(self, *names: str) -> Any:
        """Return a nested value of the config, or None if there is none."""
        tree = self.config
        for name in names:
            tree = tree.get(name) if isinstance(tree, dict) else None
        return tree

    def number(self, *names: str) -> int | None:
        """Return a positive integer of the config, or None if there is none."""
        value = self.value(*names)
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_ITERATION else None

    def text(self, *names: str) -> str:
        """Return a string of the config, or "unknown"."""
        value = self.value(*names)
        return value if isinstance(value, str) else "unknown"

    def last(self, name: str) -> float | None:
        """Return the newest value of a metric, or None if it was never measured."""
        values = self.metrics.get(name, np.empty(0))
        measured = values[~np.isnan(values)]
        return float(measured[-1]) if len(measured) else None

    def curve(self, name: str, x: str = "global_step") -> tuple[np.ndarray, np.ndarray]:
        """Return a metric over another one, where both were measured, in at most `BINS` points."""
        over, (values,) = self.curves([name], x)
        return over, values

    def curves(self, names: Sequence[str], x: str = "global_step") -> tuple[np.ndarray, list[np.ndarray]]:
        """Return metrics over another one, where all were measured, in at most `BINS` points."""
        empty = np.empty(0)
        table = [self.metrics.get(name, empty) for name in (x, *names)]
        rows = len(table[0]) if len({len(column) for column in table}) == 1 else 0
        measured = np.all([~np.isnan(column[:rows]) for column in table], axis=0)
        if not measured.any():
            return empty, [empty for _ in names]
        # After a resume the clock goes on, but a damaged file may have any order.
        order = np.argsort(table[0][measured], kind="stable")
        over, *values = (_binned(column[measured][order]) for column in table)
        return over, values

    @cached_property
    def group(self) -> str:
        """What the run trains: its config without seed and name. Runs of one group differ in their seed alone."""
        if not isinstance(self.config, dict):
            return str(self.folder)
        ignored = ("seed", "run", "runs_dir", "report")
        settings = {key: value for key, value in self.config.items() if key not in ignored}
        return json.dumps(settings, sort_keys=True, default=str)


def _binned(values: np.ndarray) -> np.ndarray:
    if len(values) <= BINS:
        return values
    edges = np.linspace(0, len(values), BINS + 1).round().astype(int)
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def read_run(run: RunData | HasFolder | Path | str) -> RunData:
    """Read a run: its folder, or the result of `holdfast.train`."""
    if isinstance(run, RunData):
        return run
    folder = Path(run) if isinstance(run, str | Path) else run.folder
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give a run's folder, for example runs/NAME.")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} has no config.json, so it is not a run; give for example runs/NAME.")
    problems = list[str]()
    config = _read_config(folder / "config.json", problems)
    metrics = _read_metrics(folder / "metrics.jsonl", problems)
    timeline = _read_timeline(folder, problems)
    return RunData(folder, config, _read_text(folder / "command.txt"), metrics, tuple(problems), timeline)


def read_runs(runs: Any) -> list[RunData]:
    """Read one run or several."""
    return [read_run(run) for run in (runs if isinstance(runs, list | tuple) else [runs])]


def group_label(runs: Sequence[RunData]) -> str:
    """Name a group: the run, or what its names have in common and the number of runs."""
    if len(runs) == 1:
        return runs[0].name
    names = [run.name for run in runs]
    common = next(i for i in range(min(map(len, names)) + 1) if len({name[: i + 1] for name in names}) > 1 or i == 64)
    return f"{names[0][:common].rstrip('-_. 0') or names[0]} · {len(runs)} seeds"


def _read_text(file: Path) -> str:
    try:
        with file.open(errors="replace") as opened:
            return opened.read(MAX_LINE)
    except OSError:
        return ""


def _read_config(file: Path, problems: list[str]) -> Any:
    try:
        config = json.loads(file.read_text(errors="replace"))
    except (ValueError, RecursionError, OSError) as error:
        problems.append(f"config.json cannot be read: {one_line(error, 120)}")
        return None
    if not isinstance(config, dict):
        problems.append("config.json is no JSON object")
        return None
    return config


def _read_timeline(folder: Path, problems: list[str]) -> Timeline | None:
    try:
        return read_timeline(folder)
    except ConfigError as error:
        problems.append(one_line(error, 200))
        return None


class _Columns:
    """Metrics of lines as columns; a line of the same iteration as the last one adds to its row."""

    def __init__(self) -> None:
        self.rows = 0
        self.too_large = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """Add one line, whose iteration is valid."""
        iterations = self._columns.setdefault("iteration", array("d"))
        if not iterations or iterations[-1] != line["iteration"]:
            self.rows += 1
        for name, value in line.items():
            if (name in NAMES or name.startswith(PREFIXES)) and _is_number(value):
                # A comparison of integers of any size does not overflow, and NaN fails it.
                if not -LARGEST <= value <= LARGEST:
                    self.too_large += 1
                    continue
                column = self._columns.setdefault(name, array("d"))
                column.extend([math.nan] * (self.rows - len(column)))
                column[-1] = float(value)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all columns, ordered by iteration; of several rows of one iteration the last."""
        for column in self._columns.values():
            column.extend([math.nan] * (self.rows - len(column)))
        arrays = {name: np.array(column) for name, column in self._columns.items()}
        if not self.rows:
            return {}
        _, last = np.unique(arrays["iteration"][::-1], return_index=True)
        rows = self.rows - 1 - last
        return {name: values[rows] for name, values in arrays.items()}


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_metrics(file: Path, problems: list[str]) -> dict[str, np.ndarray]:
    columns, unreadable = _Columns(), 0
    for text in _lines(file, problems):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        iteration = line.get("iteration") if isinstance(line, dict) else None
        if isinstance(line, dict) and _is_number(iteration) and 0 <= iteration <= MAX_ITERATION:
            columns.add(line)
        else:
            unreadable += 1
    if unreadable:
        problems.append(f"metrics.jsonl: {unreadable:,} line{'s' * (unreadable > 1)} cannot be read and are left out")
    if columns.too_large:
        count = columns.too_large
        problems.append(f"metrics.jsonl: {count:,} number{'s' * (count > 1)} not finite or beyond 1e30 are left out")
    return columns.arrays()


def _lines(file: Path, problems: list[str]) -> Iterator[bytes]:
    """Yield the lines of a file that are not empty, and longer ones in parts, which are no JSON."""
    if not file.is_file():
        problems.append("metrics.jsonl does not exist: nothing was measured")
        return
    try:
        with file.open("rb") as opened:
            while text := opened.readline(MAX_LINE):
                if text.strip():
                    yield text
    except OSError as error:
        problems.append(f"metrics.jsonl cannot be read: {one_line(error, 120)}")
