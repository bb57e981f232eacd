"""What a person sees of a run: a dashboard on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.live import Live

from holdfast.check.watch import replay_alarm
from holdfast.report.dashboard import Dashboard
from holdfast.report.memory_row import alarms, memory_cells

LINE_EVERY_S = 5.0
DRAW_EVERY_S = 0.25
SHARE = 0.008
"""How much of the time drawing may take: where a drawing is dear, the next one waits longer."""


class RunConsole:
    """Shows a run while it goes on."""

    def __init__(
        self,
        iterations: int,
        console: Console | None = None,
        *,
        title: Mapping[str, str] | None = None,
        horizon: int = 0,
        begun: int = 0,
        precision: str = "float32",
    ) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False)
        self.total = iterations
        self._board = Dashboard(
            iterations, title or {}, horizon, begun=begun, alarm_at=replay_alarm(precision)
        )
        self._started = self._last_line = time.perf_counter()
        self._worked = time.process_time()
        self._alarmed = set[str]()
        self._next_drawing, self._width = 0.0, self.console.width
        self._live: Live | None = None
        self._told: int | float = 0

    def __enter__(self) -> "RunConsole":
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            self._live = Live(self._board, console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is None and self._board.metrics and self._told < self._board.metrics["iteration"]:
            # Who ends early has said nothing for a while.
            self.say(self._line())
        if self._live is not None:
            live, self._live = self._live, None
            # Draws what came last, and gives the cursor back whatever happens.
            live.stop()

    def say(self, text: str) -> None:
        """Print a line above the dashboard."""
        self.console.print(text, markup=False)

    def alarm(self, text: str, kind: str = "") -> None:
        """Raise an alarm that stays in sight, once for each kind of it."""
        if (kind or text) in self._alarmed:
            return
        self._alarmed.add(kind or text)
        self._board.alarms.append(text)
        if self._live is None:
            self.say(f"ALARM: {text}")
        self._next_drawing = 0.0

    def show(self, metrics: Mapping[str, int | float]) -> None:
        """Show where the run stands."""
        board, now = self._board, time.perf_counter()
        board.metrics |= metrics
        board.elapsed = now - self._started
        if "charts/episodic_return" in metrics:
            board.returns.add(metrics["charts/episodic_return"])
        for kind, text in alarms(metrics, board.alarm_at):
            self.alarm(text, kind)
        if self._live is not None:
            if now >= self._next_drawing:
                self._draw(self._live, now)
        elif now - self._last_line > LINE_EVERY_S or metrics["iteration"] >= self.total:
            self._last_line, self._told = now, metrics["iteration"]
            self.say(self._line())

    def _draw(self, live: Live, now: float) -> None:
        if self._board.elapsed > 0:
            self._board.cpu = (time.process_time() - self._worked) / self._board.elapsed
        if self.console.width < self._width:
            # A terminal that became narrower has broken the lines of the last drawing in two.
            self.console.clear()
        self._width = self.console.width
        live.refresh()
        self._next_drawing = now + max(DRAW_EVERY_S, (time.perf_counter() - now) / SHARE)

    def _line(self) -> str:
        metrics, done = self._board.metrics, int(self._board.metrics["iteration"])
        told = [f"iteration {done:,} of {self.total:,}", f"step {metrics['global_step']:,.0f}"]
        told.append(f"{metrics['charts/SPS']:,.0f} steps/s")
        if "charts/episodic_return" in metrics:
            told.append(f"return {metrics['charts/episodic_return']:.3f}")
        told += [str(cell) for cell in memory_cells(metrics, self._board.horizon, self._board.alarm_at)]
        told.append(f"{self._board.left:.0f} s left")
        return " · ".join(told)
