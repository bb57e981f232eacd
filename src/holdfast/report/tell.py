"""What a run tells besides its numbers: alarms, advice, and the life of one agent."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from holdfast.experience import Segments
from holdfast.monitor import Trace, advice, shapes
from holdfast.report.console import RunConsole

SHOWN = 2
"""How many rollouts of a traced life are shown; the file has them all."""
EVALUATED = ("eval/return_mean", "eval/return_mean_memory_cleared")
USED = 0.1
"""A memory is used if clearing it costs this share of the return."""
MEASURED = ("memory/drift", "memory/stale_kl", "losses/approx_kl", "losses/grad_norm")


def _nobody(text: str) -> None:
    """Hear it, and do nothing."""


class Tell:
    """Tells what happens between two lines of metrics; without arguments, to nobody."""

    def __init__(
        self,
        console: RunConsole | None = None,
        horizon: int = 0,
        trace: Trace | None = None,
        file: Path | None = None,
    ) -> None:
        self._say = _nobody if console is None else console.say
        self._alarm = _nobody if console is None else console.alarm
        self._horizon, self._trace, self._file = horizon, trace, file
        self._reach: int | None = None

    @property
    def reach(self) -> int | None:
        """How far gradients reached when it was last measured; none: it was not yet."""
        return self._reach

    def restore(self, reach: int | None) -> None:
        """Keep in mind how far gradients reached before a run was interrupted."""
        self._reach = reach

    def rollout(self, segments: Segments, iteration: int) -> None:
        """Tell what the traced agent lived, and once how it is stored."""
        if self._trace is None:
            return
        if iteration == 0:
            rows = f"the buffer of a rollout, {len(segments)} segments of {segments.steps.shape[1]} steps"
            self._write([rows, *(f"  {line}" for line in shapes(segments.steps))], iteration)
            self._write(["their entry states", *(f"  {line}" for line in shapes(segments.entry))], iteration)
        self._write(self._trace.rollout(segments, iteration), iteration)

    def update(self, iteration: int, learnt: Mapping[str, float]) -> None:
        """Tell what the update did."""
        if self._trace is not None:
            numbers = {name: learnt[name] for name in MEASURED if name in learnt}
            self._write(self._trace.update(iteration, iteration + 1, numbers), iteration)
            if iteration + 1 == SHOWN:
                self._say(f"agent {self._trace.agent} lives on in {self._file}")

    def saw(self, metrics: dict[str, int | float], alarm: str) -> dict[str, int | float]:
        """Keep in mind how far gradients reach, and raise an alarm if there is one."""
        if "memory/gradient_reach" in metrics:
            self._reach = int(metrics["memory/gradient_reach"])
        if alarm:
            self._alarm(alarm)
        return metrics

    def advise(self, scores: Mapping[str, float]) -> None:
        """Say at the end what the reach of gradients allows to be said.

        As long as memory is not used, it tells of the network as it began, and nothing of the world.
        """
        intact, cleared = (scores.get(name) for name in EVALUATED)
        if self._reach is None or intact is None or cleared is None:
            return
        used = intact - cleared > USED * max(abs(intact), abs(cleared))
        told = advice(self._reach, self._horizon) if used else ""
        if told:
            self._say(told)

    def _write(self, lines: Iterable[str], iteration: int) -> None:
        lines = list(lines)
        if iteration < SHOWN:
            for line in lines:
                self._say(line)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
