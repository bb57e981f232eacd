"""What a person sees of a run: one progress line on a terminal, plain lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from holdfast.check.watch import REPLAY_ALARM
from holdfast.config import Config, keys_of
from holdfast.which_world import Part

LINE_EVERY_S = 5.0


class RunConsole:
    """Shows a run while it goes on."""

    def __init__(self, iterations: int, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self.total = iterations
        self._started = self._last_line = time.perf_counter()
        self._alarmed = False
        self._progress = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=4,
            disable=not self.console.is_terminal,
        )
        self._task = self._progress.add_task("", total=iterations)

    def __enter__(self) -> "RunConsole":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Print a line above the progress."""
        self.console.print(text, markup=False)

    def show(self, metrics: dict[str, int | float]) -> None:
        """Show where the run stands."""
        done = int(metrics["iteration"])
        told = _summary(metrics)
        self._progress.update(self._task, completed=done, description=told)
        error = _replay_error(metrics)
        if error > REPLAY_ALARM and not self._alarmed:
            self._alarmed = True
            self.say(
                f"ALARM: replaying a segment differs from living it by {error:.1e}. "
                "The memory is wrong somewhere; run `holdfast check` on this policy."
            )
        now = time.perf_counter()
        if not self.console.is_terminal and (now - self._last_line > LINE_EVERY_S or done >= self.total):
            self._last_line = now
            left = (now - self._started) / done * (self.total - done)
            self.say(f"iteration {done:,} of {self.total:,} · {told} · {left:.0f} s left")


def _summary(metrics: dict[str, int | float]) -> str:
    error = _replay_error(metrics)
    parts = [f"step {metrics['global_step']:,.0f}", f"{metrics['charts/SPS']:,.0f} steps/s"]
    if "charts/episodic_return" in metrics:
        parts.append(f"return {metrics['charts/episodic_return']:.3f}")
    parts.append(f"replay error {error:.0e} {'✓' if error <= REPLAY_ALARM else '✗'}")
    return " · ".join(parts)


def _replay_error(metrics: dict[str, int | float]) -> float:
    """Take the larger of the two: a policy that says little moves its values before its ratio."""
    return max(metrics["memory/replay_error"], metrics["memory/replay_value_error"])


def difference(recipe: Config, config: Config) -> Table | None:
    """Tabulate which keys differ from the recipe, if any."""
    columns = [Column(name, overflow="fold") for name in ("key", "recipe", "this run")]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for key in keys_of(config.world.name):
        # What a recipe's world does not know was not said by it.
        old = lookup(recipe, key) if key in keys_of(recipe.world.name) else "-"
        new = lookup(config, key)
        if old != new:
            table.add_row(key, Text(typed(old)), Text(typed(new)))
    return table if table.row_count else None


def typed(value: object) -> str:
    """Write a value as one types it."""
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple) and all(isinstance(part, Part) for part in value):
        return " + ".join(f"{part.label} weight={part.weight:g}" for part in value if isinstance(part, Part))
    return str(value)


def lookup(config: Config, key: str) -> object:
    """Read a dotted key."""
    found: object = config
    for part in key.split("."):
        found = getattr(found, part)
    return found
