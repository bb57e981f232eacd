"""Whether the memory of a run is right: audit of its metrics, and leaks in the reach of its policy."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holdfast.check.results import Reach
from holdfast.monitor.replay_check import CLEAR_ALARM, replay_alarm
from holdfast.report.check_page import PANELS, leaks
from holdfast.report.policy_measurements import PolicyMeasurements
from holdfast.report.run_data import RunData
from holdfast.report.text import short_number

LEAKS = {
    "rollout": "while it acts, information crosses an episode start or goes back in time",
    "replay": "in the update, information crosses an episode start or goes back in time",
    "gradient": "a gradient crosses a segment edge or an episode start",
}


NAMES = {"memory/check_replay": "stored segments", "memory/check_clear": "clear"}


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a memory."""

    text: str
    of_reach: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class AuditRow:
    """One measurement of a training, its bound, and the metric it comes from."""

    name: str
    what: str
    value: float
    measured: str
    bound: str
    ok: bool
    where: str
    short: str
    """What was measured, for a table of several runs."""
    words: str = ""
    """What it shows if it is right."""


def audit(run: RunData) -> list[AuditRow]:
    """Compare the metrics of a whole training with their bounds; those not measured are left out."""
    return [*_resets(run), *_replay(run), *_checks(run)]


def alarm_at(run: RunData) -> float:
    """Return the largest replay error that is still rounding, in the precision of the run."""
    return replay_alarm("bfloat16" if run.text("policy", "precision") == "bfloat16" else "float32")


def _resets(run: RunData) -> Iterator[AuditRow]:
    empty = np.empty(0)
    done, due = run.metrics.get("memory/resets", empty), run.metrics.get("memory/resets_due", empty)
    if len(done) != len(due) or not len(done):
        return
    measured = ~(np.isnan(done) | np.isnan(due))
    if not measured.any():
        return
    done, due = done[measured], due[measured]
    wrong = int((done != due).sum())
    numbers = f"{due.sum():,.0f} episode starts, {done.sum():,.0f} resets"
    late = f", different in {wrong:,} of {len(due):,} iterations" if wrong else ""
    words = f"{done.sum():,.0f} resets for {due.sum():,.0f} episode starts"
    text = ("resets", "each episode start resets the state", float(wrong), f"{numbers}{late}", "equal", not wrong)
    short = f"{done.sum():,.0f} of {due.sum():,.0f}"
    yield AuditRow(*text, "memory/resets, memory/resets_due", short, words)


def _replay(run: RunData) -> Iterator[AuditRow]:
    names = ("memory/replay_error", "memory/replay_value_error")
    values = [run.metrics[name] for name in names if name in run.metrics]
    measured = [value[~np.isnan(value)] for value in values]
    measured = [value for value in measured if len(value)]
    if not measured:
        return
    worst, bound = max(float(value.max()) for value in measured), alarm_at(run)
    text = f"largest {short_number(worst)} in {max(map(len, measured)):,} updates"
    row = (
        "replay error",
        "the update computes what the rollout computed",
        worst,
        text,
        f"at most {short_number(bound)}",
    )
    yield AuditRow(*row, worst <= bound, names[0], short_number(worst), f"replay error {short_number(worst)}")


def _checks(run: RunData) -> Iterator[AuditRow]:
    bound = alarm_at(run)
    for name, what, limit in (
        ("memory/check_replay", "stored segments replayed give their values and probabilities", bound),
        ("memory/check_clear", "outputs after an episode start do not depend on the steps before it", CLEAR_ALARM),
    ):
        values = run.metrics.get(name, np.empty(0))
        values = values[~np.isnan(values)]
        if len(values):
            worst = float(values.max())
            text = f"largest {short_number(worst)} in {len(values):,} check{'s' * (len(values) > 1)}"
            limit_text = f"at most {short_number(limit)}"
            row = (NAMES[name], what, worst, text, limit_text, worst <= limit, name)
            yield AuditRow(*row, short_number(worst))


def memory_faults(run: RunData, measured: PolicyMeasurements) -> list[Fault]:
    """Return what is wrong with the memory of a run, the reach of its policy first."""
    faults = [] if measured.reach is None else list(_leaks(measured.reach))
    return [*faults, *(Fault(f"{row.what}: {row.measured}, must be {row.bound}") for row in audit(run) if not row.ok)]


def _leaks(reach: Reach) -> Iterator[Fault]:
    for panel in PANELS:
        cells = leaks(reach, panel)
        if bool(cells.any()):
            source, agent, target = cells.nonzero()[0].tolist()
            size = float(getattr(reach, panel)[cells].max())
            where = f"agent {agent}, observation of step {source}, output of step {target}"
            count = int(cells.sum())
            text = (
                f"{LEAKS[panel]}: {count:,} cell{'s' * (count > 1)}, the first at {where}; largest {short_number(size)}"
            )
            yield Fault(text, of_reach=True)
