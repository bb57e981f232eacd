"""Layout of the dashboard, and the cells of its memory row."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holdfast.config.sizes import format_bytes
from holdfast.monitor.replay_check import REPLAY_ALARM
from holdfast.report.metrics import Metrics, replay_error
from holdfast.report.text import RunningMeans, clock, short_number, sparkline


class TableCell(NamedTuple):
    """One cell of a row."""

    text: str
    ok: bool | None = None
    """Whether the value is healthy; None: it has no bound."""

    def __str__(self) -> str:
        return self.text if self.ok is None else f"{self.text} {'✓' if self.ok else '✗'}"


def memory_cells(metrics: Metrics, horizon: int, alarm_at: float = REPLAY_ALARM) -> Iterator[TableCell]:
    """Yield the cells of the memory row; metrics that were not measured are left out."""
    if "memory/resets" in metrics and "memory/resets_due" in metrics:
        done, due = metrics["memory/resets"], metrics["memory/resets_due"]
        yield TableCell(f"resets {done:,.0f}/{due:,.0f}", done == due)
    error = replay_error(metrics)
    if error is not None:
        yield TableCell(f"replay error {short_number(error)}", error <= alarm_at)
    if "memory/drift" in metrics:
        yield TableCell(f"drift {short_number(metrics['memory/drift'])}")
    if "memory/gradient_reach" in metrics:
        limit = f"/{horizon}" if horizon else ""
        yield TableCell(f"grad reach {metrics['memory/gradient_reach']:.0f}{limit}")
    if "memory/state_norm" in metrics:
        yield TableCell(f"state norm {short_number(metrics['memory/state_norm'])}")
    if "memory/age_max" in metrics:
        yield TableCell(f"age max {metrics['memory/age_max']:,.0f}")


MAX_WIDTH = 132
"""Columns of the widest dashboard; longer lines are hard to read."""
TIMES = {"world": "cyan", "forward": "green", "copy": "yellow", "update": "magenta", "other": "bright_black"}
LOSSES = {"policy_loss": "policy", "value_loss": "value", "explained_variance": "expl. var"}
"""Labels of losses whose names are too long."""
MAX_WORLDS = 6
"""Worlds of a mixture that are listed."""
DIM, BOLD = "bright_black", "bold"
GROWTH_ITERATIONS = 32
"""Before this iteration, the slope of the resident memory means nothing."""


@dataclass
class Dashboard:
    """State of a run, rendered at the current width of the terminal."""

    iterations: int
    title: Mapping[str, str] = field(default_factory=dict)
    """Description of the run in display order; `run` is its name."""
    horizon: int = 0
    metrics: dict[str, int | float] = field(default_factory=dict)
    """Latest value of each metric."""
    returns: RunningMeans = field(default_factory=RunningMeans)
    alarms: list[str] = field(default_factory=list)
    elapsed: float = 0.0
    cpu: float | None = None
    """CPU time over wall-clock time of this process."""
    first_iteration: int = 0
    """Iterations before this process, if the run was resumed."""
    seconds_before: float = 0.0
    """Seconds of the run before this process."""
    alarm_at: float = REPLAY_ALARM
    """Largest healthy replay error."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = min(options.max_width, MAX_WIDTH)
        # The console is set to soft wrap for plain lines; the dashboard wraps and truncates.
        yield from console.render(
            Panel(
                Group(*self._body(width - 4)),
                box=box.ROUNDED,
                title=Text.assemble(("holdfast ", "bold cyan"), (self.title.get("run", ""), BOLD)),
                title_align="left",
                border_style="cyan",
                width=width,
            ),
            options.update(no_wrap=False, overflow="ellipsis", width=width),
        )

    def _body(self, width: int) -> Iterator[RenderableType]:
        facts = [TableCell(fact) for name, fact in self.title.items() if name != "run"]
        yield from lines(facts, width, DIM)
        yield self._progress(width)
        yield from lines(self._status(), width)
        yield Rule(style=DIM)
        yield self._columns(width)
        yield Rule(style=DIM)
        yield from _labelled("machine", list(self._machine()), width)
        for alarm in self.alarms:
            yield Text(f"ALARM {alarm}", "bold red", overflow="fold")
        yield from _labelled("memory", list(memory_cells(self.metrics, self.horizon, self.alarm_at)), width)

    def _progress(self, width: int) -> RenderableType:
        done = int(self.metrics.get("iteration", 0))
        share = f"{100 * done / self.iterations:3.0f} %"
        row = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(self.iterations, done, width=width - 7, complete_style="cyan", finished_style="green")
        row.add_row(bar, Text(share, BOLD))
        return row

    def _status(self) -> list[TableCell]:
        done, steps = int(self.metrics.get("iteration", 0)), self.metrics.get("global_step", 0)
        if not done:
            return [TableCell(f"iteration 0 of {self.iterations:,}"), TableCell("first rollout in progress")]
        return [
            TableCell(f"{steps:,.0f} of {steps / done * self.iterations:,.0f} steps"),
            TableCell(f"{self.metrics.get('charts/SPS', 0):,.0f} steps/s"),
            TableCell(f"{clock(self.seconds_before + self.elapsed)} elapsed"),
            TableCell(f"{clock(self.left)} left"),
        ]

    @property
    def left(self) -> float:
        """Estimated seconds left, from the mean time of an iteration."""
        done = int(self.metrics["iteration"])
        return self.elapsed / max(1, done - self.first_iteration) * (self.iterations - done)

    def _columns(self, width: int) -> RenderableType:
        """Arrange the groups in as many columns as fit."""
        count = 1 if width < 52 else 2 if width < 72 else 3 if width < 104 else 4
        column = (width - 3 * (count - 1)) // count
        groups = [self._times(column), self._losses(), self._episodes(column)]
        if count == 4:
            groups.append(self._learning())
        table = Table.grid(padding=(0, 3, 0, 0), pad_edge=False)
        for _ in range(count):
            table.add_column(width=column, no_wrap=True)
        for first in range(0, len(groups), count):
            row = groups[first : first + count]
            table.add_row(*row, *[""] * (count - len(row)))
        return table

    def _times(self, width: int) -> RenderableType:
        spent = {name: self.metrics.get(f"time/{name}", 0.0) for name in TIMES}
        total = sum(spent.values())
        table = _table("time")
        for name, colour in TIMES.items():
            share = spent[name] / total if total else 0.0
            bar = ProgressBar(1.0, share, width=max(4, width - 16), complete_style=colour, finished_style=colour)
            table.add_row(name, bar, f"{100 * share:.0f} %" if total else "")
        return table

    def _losses(self) -> RenderableType:
        table = _table("losses")
        for name, number in self.metrics.items():
            if name.startswith("losses/") and "@" not in name:
                loss = name.partition("/")[2]
                table.add_row(LOSSES.get(loss) or loss.replace("_", " "), short_number(number, 3))
        return table

    def _episodes(self, width: int) -> RenderableType:
        labels = {"return": "episodic_return", "length": "episodic_length", "ended": "episodes"}
        table = self._charts("episodes", labels)
        per_world = {name for name in self.metrics if name.startswith("charts/episodic_return@")}
        for name in sorted(per_world)[:MAX_WORLDS]:
            table.add_row(Text(name.partition("@")[2], DIM), short_number(self.metrics[name], 3))
        if len(per_world) > MAX_WORLDS:
            table.add_row(Text(f"and {len(per_world) - MAX_WORLDS} more", DIM), "")
        curve = Text(sparkline(self.returns.points, width), "cyan")
        return Group(table, curve) if self.returns.points else table

    def _learning(self) -> RenderableType:
        table = self._charts("learning", {"lr": "learning_rate", "epochs": "epochs", "grad steps": "gradient_steps"})
        for name, number in self.metrics.items():
            if name.startswith("charts/scheduled@"):
                table.add_row(name.rpartition(".")[2], short_number(number, 3))
        return table

    def _charts(self, title: str, labels: Mapping[str, str]) -> Table:
        """Return a table of those `charts/` metrics that were measured."""
        table = _table(title)
        for label, name in labels.items():
            if f"charts/{name}" in self.metrics:
                table.add_row(label, short_number(self.metrics[f"charts/{name}"], 3))
        return table

    def _machine(self) -> Iterator[TableCell]:
        if self.cpu is not None:
            yield TableCell(f"cpu {100 * self.cpu:.0f} %")
        for name in ("process", "gpu"):
            if f"machine/{name}_bytes" in self.metrics:
                peak = self.metrics.get(f"machine/{name}_peak_bytes")
                suffix = "" if peak is None else f", peak {format_bytes(peak)}"
                yield TableCell(f"{name} {format_bytes(self.metrics[f'machine/{name}_bytes'])}{suffix}")
        if "machine/growth" in self.metrics and self.metrics["iteration"] >= GROWTH_ITERATIONS:
            yield TableCell(f"growth {format_bytes(self.metrics['machine/growth'])} per million steps")


def lines(cells: list[TableCell], width: int, style: str = "") -> Iterator[Text]:
    """Join cells into lines, breaking between cells."""
    line = Text(style=style)
    for cell in cells:
        text = _cell_text(cell)
        if line and line.cell_len + 3 + text.cell_len > width:
            yield line
            line = Text(style=style)
        separator = [line, (" · ", DIM)] if line else []
        line = Text.assemble(*separator, text, style=style)
    if line:
        yield line


def _cell_text(cell: TableCell) -> Text:
    if cell.ok is None:
        return Text(cell.text)
    return Text.assemble(cell.text, (" ✓", "bold green") if cell.ok else (" ✗", "bold red"))


def _labelled(label: str, cells: list[TableCell], width: int) -> Iterator[RenderableType]:
    if cells:
        row = Table.grid(padding=(0, 2, 0, 0))
        row.add_column(width=7)
        row.add_row(Text(label, "bold cyan"), Group(*lines(cells, width - 9)))
        yield row


def _table(title: str) -> Table:
    table = Table(box=None, show_header=True, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold cyan")
    table.add_column(title, min_width=9)
    table.add_column(justify="right" if title != "time" else "left", min_width=7)
    if title == "time":
        table.add_column(justify="right")
    return table
