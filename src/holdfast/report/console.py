"""The console of a run: dashboard or plain lines, alarms and advice."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table

from holdfast.errors import writing
from holdfast.monitor import AgentTrace, advice, shapes
from holdfast.monitor.replay_check import replay_alarm
from holdfast.report.alarms import LearningAlarms
from holdfast.report.dashboard import Dashboard, memory_cells
from holdfast.report.metrics import Metrics, alarms
from holdfast.rollout import Segments

LINE_EVERY_S = 5.0
DRAW_EVERY_S = 0.25
DRAW_SHARE = 0.008
"""Largest fraction of the time spent on drawing: after a slow drawing, the next one waits longer."""


class RunConsole:
    """Live dashboard on a terminal, plain lines elsewhere; with `quiet` alarms alone."""

    def __init__(
        self,
        iterations: int,
        console: Console | None = None,
        *,
        title: Mapping[str, str] | None = None,
        horizon: int = 0,
        first_iteration: int = 0,
        precision: str = "float32",
        learning: LearningAlarms | None = None,
        quiet: bool = False,
        label: str = "",
    ) -> None:
        # In a notebook too, lines are text: as HTML each would be a paragraph.
        self.console = console or Console(highlight=False, soft_wrap=True, emoji=False, force_jupyter=False)
        self._quiet, self._label = quiet, label
        self.total = iterations
        self._dashboard = Dashboard(
            iterations, title or {}, horizon, first_iteration=first_iteration, alarm_at=replay_alarm(precision)
        )
        self._started = self._last_line = time.perf_counter()
        self._started_cpu = time.process_time()
        self._alarmed, self._learning = set[str](), learning
        self._next_drawing, self._width = 0.0, self.console.width
        self._live: Live | None = None
        self._printed: int | float = 0

    def __enter__(self) -> "RunConsole":
        if self.console.is_terminal and not self.console.is_dumb_terminal and not self._quiet:
            self._live = Live(self._dashboard, console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            # Draws the last metrics and restores the cursor.
            live.stop()
        elif self._printed < self._dashboard.metrics.get("iteration", 0):
            # A run that ends early has not printed its last iterations.
            self.print(self._line())

    def restore(self, seconds: float, lines: Iterable[Metrics]) -> None:
        """Go on with the clock, the curve and the alarms of a resumed run."""
        self._dashboard.seconds_before = seconds
        for metrics in lines:
            if "charts/episodic_return" in metrics:
                self._dashboard.returns.add(metrics["charts/episodic_return"])
            if self._learning is not None:
                # What it raised then is raised again if it lasts.
                list(self._learning.check(metrics))

    def print(self, text: str | Table) -> None:
        """Print a line above the dashboard."""
        if not self._quiet:
            self.console.print(text, markup=False)

    def alarm(self, text: str, kind: str = "") -> None:
        """Show an alarm until the end of the run, once per kind."""
        if (kind or text) in self._alarmed:
            return
        self._alarmed.add(kind or text)
        self._dashboard.alarms.append(text)
        if self._live is None:
            self.console.print(f"ALARM: {self._label}{text}", markup=False)
        self._next_drawing = 0.0

    def show(self, metrics: Metrics) -> None:
        """Show the metrics of an iteration."""
        board, now = self._dashboard, time.perf_counter()
        board.metrics |= metrics
        board.elapsed = now - self._started
        of_learning = () if self._learning is None else self._learning.check(metrics)
        for kind, text in (*alarms(metrics, board.alarm_at), *of_learning):
            self.alarm(text, kind)
        if self._live is not None:
            if "charts/episodic_return" in metrics:
                board.returns.add(metrics["charts/episodic_return"])
            if now >= self._next_drawing:
                self._draw(self._live, now)
        elif now - self._last_line > LINE_EVERY_S or metrics["iteration"] >= self.total:
            self._last_line, self._printed = now, metrics["iteration"]
            self.print(self._line())

    def _draw(self, live: Live, now: float) -> None:
        if self._dashboard.elapsed > 0:
            self._dashboard.cpu = (time.process_time() - self._started_cpu) / self._dashboard.elapsed
        if self.console.width < self._width:
            # A terminal made narrower has wrapped the lines of the last drawing.
            self.console.clear()
        self._width = self.console.width
        live.refresh()
        self._next_drawing = now + max(DRAW_EVERY_S, (time.perf_counter() - now) / DRAW_SHARE)

    def _line(self) -> str:
        board, metrics = self._dashboard, self._dashboard.metrics
        cells = [f"iteration {int(metrics['iteration']):,} of {self.total:,}"]
        cells += [f"step {metrics['global_step']:,.0f}", f"{metrics['charts/SPS']:,.0f} steps/s"]
        if "charts/episodic_return" in metrics:
            cells.append(f"return {metrics['charts/episodic_return']:.3f}")
        cells += map(str, memory_cells(metrics, board.horizon, board.alarm_at))
        return " · ".join([*cells, f"{board.left:.0f} s left"])


TRACED_ITERATIONS = 2
"""Iterations of a traced agent that are printed; the file has all."""
EVALUATED = ("eval/return_mean", "eval/return_mean_memory_cleared")
USED = 0.1
"""Memory counts as used if clearing it costs this fraction of the return."""
TRACED_METRICS = ("memory/drift", "memory/stale_kl", "losses/approx_kl", "losses/grad_norm")


def _discard(text: str) -> None:
    pass


class RunNotices:
    """Notices of a run beside its metrics: agent trace, alarms, advice; dropped without a console."""

    def __init__(
        self,
        console: RunConsole | None = None,
        horizon: int = 0,
        trace: AgentTrace | None = None,
        file: Path | None = None,
    ) -> None:
        self._print = _discard if console is None else console.print
        self._alarm = _discard if console is None else console.alarm
        self._horizon, self._trace, self._file = horizon, trace, file
        self.reach: int | None = None
        """Last measured gradient reach in steps, also from a checkpoint; None: not yet measured."""

    def rollout(self, segments: Segments, iteration: int) -> None:
        """Write the traced agent's steps, and once the layout of the rollout buffer."""
        if self._trace is None:
            return
        if iteration == 0:
            rows = f"rollout buffer: {len(segments)} segments of {segments.steps.shape[1]} steps"
            self._write([rows, *(f"  {line}" for line in shapes(segments.steps))], iteration)
            self._write(["entry states", *(f"  {line}" for line in shapes(segments.entry_state))], iteration)
        self._write(self._trace.rollout(segments, iteration), iteration)

    def update(self, iteration: int, update_metrics: Mapping[str, float]) -> None:
        """Write the traced agent's update metrics."""
        if self._trace is not None:
            metrics = {name: update_metrics[name] for name in TRACED_METRICS if name in update_metrics}
            self._write(self._trace.update(iteration, iteration + 1, metrics), iteration)
            if iteration + 1 == TRACED_ITERATIONS:
                self._print(f"agent {self._trace.agent}: the trace continues in {self._file}")

    def alarm(self, text: str) -> None:
        """Show an alarm; "": there is none."""
        if text:
            self._alarm(text)

    def graphs(self, text: str) -> None:
        """Print what came of recording CUDA graphs."""
        self._print(text)

    def on_metrics(self, metrics: dict[str, int | float], alarm: str) -> dict[str, int | float]:
        """Record the gradient reach, show an alarm if there is one, and return the metrics."""
        if "memory/gradient_reach" in metrics:
            self.reach = int(metrics["memory/gradient_reach"])
        self.alarm(alarm)
        return metrics

    def print_advice(self, scores: Mapping[str, float]) -> None:
        """Print advice on trainer.bptt_horizon after the final evaluation.

        Only if the policy uses its memory: otherwise the reach is that of the initial weights.
        """
        intact, cleared = (scores.get(name) for name in EVALUATED)
        if self.reach is None or intact is None or cleared is None:
            return
        if intact - cleared > USED * max(abs(intact), abs(cleared)):
            text = advice(self.reach, self._horizon)
            if text:
                self._print(text)

    def _write(self, lines: Iterable[str], iteration: int) -> None:
        lines = list(lines)
        if iteration < TRACED_ITERATIONS:
            for line in lines:
                self._print(line)
        if self._file is not None:
            with writing(self._file), self._file.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
