"""The dashboard of a run: what stands where on the terminal."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.rule import Rule
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holdfast.check.watch import REPLAY_ALARM
from holdfast.report.memory_row import Cell, memory_cells
from holdfast.report.numbers import Course, bytes_in_words, clock, short, spark

WIDEST = 132
"""Where lines become too long to read, the rest of a terminal is left free."""
TIMES = {"world": "cyan", "forward": "green", "copy": "yellow", "update": "magenta", "other": "bright_black"}
LOSSES = {
    "losses/policy_loss": "policy",
    "losses/value_loss": "value",
    "losses/entropy": "entropy",
    "losses/approx_kl": "kl",
    "losses/clipfrac": "clipped",
    "losses/grad_norm": "gradient",
    "losses/explained_variance": "explained",
    "losses/importance": "importance",
}
WORLDS = 6
"""How many worlds of a mixture are listed."""
SOFT, LOUD = "bright_black", "bold"


YOUNG = 32
"""In fewer iterations a line through readings of memory tells nothing."""


@dataclass
class Dashboard:
    """All that is known of a run, drawn as wide as the terminal is at that moment."""

    iterations: int
    title: Mapping[str, str] = field(default_factory=dict)
    """What the run is, in the order it is told; `run` is its name."""
    horizon: int = 0
    metrics: dict[str, int | float] = field(default_factory=dict)
    """The latest of each number."""
    returns: Course = field(default_factory=Course)
    alarms: list[str] = field(default_factory=list)
    elapsed: float = 0.0
    cpu: float | None = None
    """Processor time over time, of this process."""
    begun: int = 0
    """How many iterations were lived before, if the run goes on."""
    alarm_at: float = REPLAY_ALARM
    """Above which replay error something is wrong."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        width = min(options.max_width, WIDEST)
        # Whatever the console is set to for plain lines: here they are broken and cut to measure.
        yield from console.render(
            Panel(
                Group(*self._body(width - 4)),
                box=box.ROUNDED,
                title=Text.assemble(("holdfast ", "bold cyan"), (self.title.get("run", ""), LOUD)),
                title_align="left",
                border_style="cyan",
                width=width,
            ),
            options.update(no_wrap=False, overflow="ellipsis", width=width),
        )

    def _body(self, width: int) -> Iterator[RenderableType]:
        facts = [Cell(fact) for name, fact in self.title.items() if name != "run"]
        yield from lines(facts, width, SOFT)
        yield self._progress(width)
        yield from lines(self._standing(), width)
        yield Rule(style=SOFT)
        yield self._columns(width)
        yield Rule(style=SOFT)
        yield from _labelled("machine", list(self._machine()), width)
        for alarm in self.alarms:
            yield Text(f"ALARM {alarm}", "bold red", overflow="fold")
        yield from _labelled("memory", list(memory_cells(self.metrics, self.horizon, self.alarm_at)), width)

    def _progress(self, width: int) -> RenderableType:
        done = int(self.metrics.get("iteration", 0))
        share = f"{100 * done / self.iterations:3.0f} %"
        row = Table.grid(padding=(0, 1, 0, 0))
        bar = ProgressBar(
            self.iterations, done, width=width - 7, complete_style="cyan", finished_style="green"
        )
        row.add_row(bar, Text(share, LOUD))
        return row

    def _standing(self) -> list[Cell]:
        done, steps = int(self.metrics.get("iteration", 0)), self.metrics.get("global_step", 0)
        if not done:
            return [Cell(f"iteration 0 of {self.iterations:,}"), Cell("the first one is on its way")]
        return [
            Cell(f"{steps:,.0f} of {steps / done * self.iterations:,.0f} steps"),
            Cell(f"{self.metrics.get('charts/SPS', 0):,.0f} steps/s"),
            Cell(f"{clock(self.elapsed)} gone"),
            Cell(f"{clock(self.left)} left"),
        ]

    @property
    def left(self) -> float:
        """How many seconds are left, by how long iterations took so far."""
        done = int(self.metrics["iteration"])
        return self.elapsed / max(1, done - self.begun) * (self.iterations - done)

    def _columns(self, width: int) -> RenderableType:
        """Lay the groups side by side, as many as there is room for."""
        count = 1 if width < 52 else 2 if width < 72 else 3 if width < 104 else 4
        each = (width - 3 * (count - 1)) // count
        groups = [self._times(each), self._losses(), self._episodes(each)]
        if count == 4:
            groups.append(self._learning())
        table = Table.grid(padding=(0, 3, 0, 0), pad_edge=False)
        for _ in range(count):
            table.add_column(width=each, no_wrap=True)
        for first in range(0, len(groups), count):
            row = groups[first : first + count]
            table.add_row(*row, *[""] * (count - len(row)))
        return table

    def _times(self, width: int) -> RenderableType:
        spent = {name: self.metrics.get(f"time/{name}", 0.0) for name in TIMES}
        whole = sum(spent.values())
        table = _table("time")
        for name, colour in TIMES.items():
            share = spent[name] / whole if whole else 0.0
            bar = ProgressBar(
                1.0, share, width=max(4, width - 16), complete_style=colour, finished_style=colour
            )
            table.add_row(name, bar, f"{100 * share:.0f} %" if whole else "")
        return table

    def _losses(self) -> RenderableType:
        table = _table("losses")
        for name, number in self.metrics.items():
            if name.startswith("losses/") and "@" not in name:
                label = LOSSES.get(name) or name.partition("/")[2].replace("_", " ")
                table.add_row(label, short(number, 3))
        return table

    def _episodes(self, width: int) -> RenderableType:
        table = _table("episodes")
        for label, name in (
            ("return", "episodic_return"),
            ("length", "episodic_length"),
            ("ended", "episodes"),
        ):
            if f"charts/{name}" in self.metrics:
                table.add_row(label, short(self.metrics[f"charts/{name}"], 3))
        each = {name for name in self.metrics if name.startswith("charts/episodic_return@")}
        for name in sorted(each)[:WORLDS]:
            table.add_row(Text(name.partition("@")[2], SOFT), short(self.metrics[name], 3))
        if len(each) > WORLDS:
            table.add_row(Text(f"and {len(each) - WORLDS} more", SOFT), "")
        course = Text(spark(self.returns.points, width), "cyan")
        return Group(table, course) if self.returns.points else table

    def _learning(self) -> RenderableType:
        table = _table("learning")
        for label, name in (
            ("step size", "learning_rate"),
            ("epochs", "epochs"),
            ("steps", "gradient_steps"),
        ):
            if f"charts/{name}" in self.metrics:
                table.add_row(label, short(self.metrics[f"charts/{name}"], 3))
        for name, number in self.metrics.items():
            if name.startswith("charts/scheduled@"):
                table.add_row(name.rpartition(".")[2], short(number, 3))
        return table

    def _machine(self) -> Iterator[Cell]:
        if self.cpu is not None:
            yield Cell(f"cpu {100 * self.cpu:.0f} %")
        for label, name in (("process", "process"), ("gpu", "gpu")):
            if f"machine/{name}_bytes" in self.metrics:
                peak = self.metrics.get(f"machine/{name}_peak_bytes")
                most = "" if peak is None else f", at most {bytes_in_words(peak)}"
                yield Cell(f"{label} {bytes_in_words(self.metrics[f'machine/{name}_bytes'])}{most}")
        if "machine/growth" in self.metrics and self.metrics["iteration"] >= YOUNG:
            yield Cell(f"growth {bytes_in_words(self.metrics['machine/growth'])} a million steps")


def lines(cells: list[Cell], width: int, style: str = "") -> Iterator[Text]:
    """Set cells behind each other, broken between two of them where a line is full."""
    line = Text(style=style)
    for cell in cells:
        told = _told(cell)
        if line and line.cell_len + 3 + told.cell_len > width:
            yield line
            line = Text(style=style)
        between = [line, (" · ", SOFT)] if line else []
        line = Text.assemble(*between, told, style=style)
    if line:
        yield line


def _told(cell: Cell) -> Text:
    if cell.ok is None:
        return Text(cell.text)
    return Text.assemble(cell.text, (" ✓", "bold green") if cell.ok else (" ✗", "bold red"))


def _labelled(label: str, cells: list[Cell], width: int) -> Iterator[RenderableType]:
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
