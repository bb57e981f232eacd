"""What a section of a report is made of: plots, tables, numbers, commands as HTML."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import Any

import numpy as np

from holdfast.report.memory_faults import Fault, memory_faults
from holdfast.report.policy_measurements import PolicyMeasurements
from holdfast.report.run_data import RunData, group_label
from holdfast.report.text import clock, short_number
from holdfast.report.theme import as_svg, plain

MAX_ROWS = 60
"""Rows of a table."""
Column = Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class Figure:
    """A plot of the page, and its numbers as columns."""

    name: str
    svg: str
    caption: str
    data: Mapping[str, Column] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """One question, answered in a sentence, with plots and tables; `lead` and `body` are HTML."""

    name: str
    title: str
    lead: str
    figures: Sequence[Figure] = ()
    body: str = ""
    layout: str = ""
    of: str = ""
    """The run or runs that it is about, in a report of several."""


@dataclass(frozen=True)
class Report:
    """The runs of a report and what was measured on their policies."""

    runs: Sequence[RunData]
    measured: Sequence[PolicyMeasurements]

    @property
    def run(self) -> RunData:
        """The first run, which sections about one run show."""
        return self.runs[0]

    @property
    def groups(self) -> list[list[int]]:
        """Numbers of the runs that differ in their seed alone, together."""
        groups = dict[str, list[int]]()
        for number, run in enumerate(self.runs):
            groups.setdefault(run.group, []).append(number)
        return list(groups.values())

    def name_of(self, *numbers: int) -> str:
        """Return the name of a run or of a group of them, for a section about them alone; "" if there are no others."""
        if len(numbers) == len(self.runs):
            return ""
        return plain(group_label([self.runs[number] for number in numbers]))

    @property
    def title(self) -> str:
        """The run's name, or how many runs there are."""
        return self.run.name if len(self.runs) == 1 else f"{len(self.runs)} runs side by side"

    @property
    def subtitle(self) -> str:
        """World, policy and progress."""
        if len(self.runs) > 1:
            return " · ".join(plain(run.name) for run in self.runs)
        return " · ".join(_facts(self.run))

    @cached_property
    def _faults(self) -> list[list[Fault]]:
        return [memory_faults(run, measured) for run, measured in zip(self.runs, self.measured, strict=True)]

    @property
    def faults(self) -> list[str]:
        """What is wrong with the memory of the runs, as sentences."""
        several = len(self.runs) > 1
        pairs = ((run.name, fault) for run, faults in zip(self.runs, self._faults, strict=True) for fault in faults)
        return [f"{plain(name)}: {fault}" if several else str(fault) for name, fault in pairs]

    @property
    def shown(self) -> int:
        """Number of the run whose reach is drawn: the first with a fault, or else the first that was measured."""
        wrong = [number for number, faults in enumerate(self._faults) if faults]
        measured = [number for number, each in enumerate(self.measured) if each.reach is not None]
        return next(iter([*(n for n in wrong if n in measured), *measured, 0]))

    @property
    def faulty(self) -> RunData:
        """The first run whose memory is not right."""
        return next((run for run, faults in zip(self.runs, self._faults, strict=True) if faults), self.run)


def _facts(run: RunData) -> list[str]:
    steps, iteration = run.last("global_step"), run.last("iteration")
    facts = [f"{plain(run.text('policy', 'name'))} on {plain(run.text('world', 'name'))}"]
    if steps is not None and iteration is not None:
        facts.append(f"{steps:,.0f} steps in {iteration:,.0f} iterations")
    seconds = run.last("seconds")
    facts += [clock(seconds)] if seconds is not None and 0 <= seconds < 1e9 else []
    seed = run.value("seed")
    return [*facts, f"seed {seed}"] if isinstance(seed, int) and abs(seed) < 2**63 else facts


def command(verb: str, run: RunData, *options: str) -> str:
    """Return a command to type, about a run."""
    return f"<code>{escape(shlex.join(['holdfast', verb, str(run.folder), *options]))}</code>"


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells are HTML."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows[:MAX_ROWS])
    more = f"<p class='soft'>and {len(rows) - MAX_ROWS} more</p>" if len(rows) > MAX_ROWS else ""
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>{more}'


def make_figure(name: str, figure: Any, caption: str, data: Mapping[str, Column], alt: str) -> Figure:
    """Return a plot for the page; `alt` says what it shows where it cannot be seen."""
    return Figure(name, as_svg(figure, name, escape(alt)), escape(caption), data)


def number_text(value: int | float | None, digits: int = 3) -> str:
    """Format a number, or a dash where there is none."""
    return "-" if value is None else short_number(value, digits=digits)


def mark(ok: bool | None) -> str:
    """Return a green or a red mark; nothing where it is not known."""
    return "" if ok is None else '<span class="good">✓</span>' if ok else '<span class="bad">✗</span>'
