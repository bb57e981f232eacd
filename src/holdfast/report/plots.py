"""Plots of runs as matplotlib figures, for reports and notebooks: `holdfast.plots.learning_curve(run)`.

A run is a folder, its name, or what `holdfast.train` returned; several are a list.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from holdfast.errors import ConfigError
from holdfast.monitor.replay_check import replay_alarm
from holdfast.monitor.timeline import FILE
from holdfast.report.run_data import BINS, RunData, group_label, read_runs
from holdfast.report.state_plots import state_timeline
from holdfast.report.text import short_number
from holdfast.report.theme import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PAPER,
    RED,
    SERIES,
    SOFT,
    TEAL,
    VIOLET,
    drawing,
    legend_above,
    new_figure,
    plain,
)

MAX_GROUPS = 8
"""Curves of one plot."""
RESAMPLES = 500
EXACT = 1e-9
"""Replay errors are drawn no smaller: 0 has no place on a logarithmic axis."""
X_AXES = {"steps": ("global_step", "agent steps"), "time": ("seconds", "seconds of training")}
STEPS = (1, 2, 2.5, 5, 10)
"""Multiples at which an axis has ticks."""
PHASES = {"world": TEAL, "forward": GREEN, "copy": ORANGE, "update": VIOLET, "other": SOFT}
"""Parts of an iteration and their colours."""


def learning_curve(runs: Any, x: str = "steps", metric: str = "charts/episodic_return") -> Figure:
    """Draw the return over steps or time; several runs that differ in their seed as interquartile mean and band."""
    with drawing():
        figure, axes = new_figure()
        curves = grouped_curves(read_runs(runs), metric, X_AXES[x][0])
        for (label, curve), colour in zip(list(curves.items())[:MAX_GROUPS], SERIES, strict=False):
            grid, middle, low, high = curve
            axes.plot(grid, middle, color=colour, linewidth=1.8, label=plain(label, 36))
            if (high > low).any():
                axes.fill_between(grid, low, high, color=colour, alpha=0.2, linewidth=0)
        if metric == "charts/episodic_return":
            _evaluation_marks(axes, read_runs(runs), X_AXES[x][0])
        if len(axes.get_legend_handles_labels()[0]) > 1:
            legend_above(figure, axes)
        return _labelled(figure, axes, X_AXES[x][1], "return of training episodes")


def _evaluation_marks(axes: Axes, runs: Sequence[RunData], x: str) -> None:
    """Mark the evaluations of one run: greedy, sampled, memory cleared."""
    if len(runs) != 1:
        return
    marks = {
        "eval/return_mean": ("greedy", "o", INK),
        "eval/sampled_return_mean": ("sampled", "D", INK),
        "eval/return_mean_memory_cleared": ("memory cleared", "x", RED),
    }
    for name, (label, marker, colour) in marks.items():
        over, values = runs[0].curve(name, x)
        if len(values):
            (line,) = axes.plot(over, values, marker, color=colour, markersize=5, label=f"evaluation, {label}")
            line.set_markerfacecolor("none")
    axes.margins(x=0.03)


def grouped_curves(
    runs: Sequence[RunData], metric: str, x: str
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Return for each group of runs: x, interquartile mean, and the ends of its 95 % band over runs."""
    groups = dict[str, list[RunData]]()
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    curves = {}
    for members in groups.values():
        measured = [(run, *run.curve(metric, x)) for run in members]
        measured = [(run, over, values) for run, over, values in measured if len(values)]
        if not measured:
            continue
        label = group_label([run for run, _, _ in measured])
        label = f"{label} ({len(curves) + 1})" if label in curves else label
        if len(measured) == 1:
            _, over, values = measured[0]
            curves[label] = (over, values, values, values)
            continue
        # Where all of them were measured.
        start, stop = max(over[0] for _, over, _ in measured), min(over[-1] for _, over, _ in measured)
        grid = np.linspace(start, max(start, stop), min(BINS, max(len(over) for _, over, _ in measured)))
        table = np.stack([np.interp(grid, over, values) for _, over, values in measured])
        curves[label] = (grid, interquartile_mean(table), *_band(table))
    return curves


def interquartile_mean(table: np.ndarray) -> np.ndarray:
    """Mean over the first axis without a quarter, rounded down, at each end."""
    cut = len(table) // 4
    return np.asarray(np.sort(table, axis=0)[cut : len(table) - cut].mean(0))


def _band(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 95 % interval of the interquartile mean, by bootstrap over runs."""
    rng = np.random.default_rng(0)
    means = [interquartile_mean(table[rng.integers(len(table), size=len(table))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(np.stack(means), (0.025, 0.975), axis=0)
    return low, high


def replay_error(run: Any) -> Figure:
    """Draw the largest difference between rollout and replay in every update, and the bound of the alarm."""
    (data,) = read_runs(run)
    with drawing():
        figure, axes = new_figure()
        bound = replay_alarm("bfloat16" if data.text("policy", "precision") == "bfloat16" else "float32")
        for name, label, colour in (
            ("memory/replay_error", "action probability", BLUE),
            ("memory/replay_value_error", "value", ORANGE),
        ):
            steps, values = data.curve(name)
            axes.plot(steps, np.clip(values, EXACT, None), color=colour, linewidth=1.5, label=label)
        axes.axhline(bound, color=RED, linewidth=1.2, linestyle=(0, (4, 2)), label=f"alarm at {short_number(bound)}")
        axes.set_yscale("log")
        legend_above(figure, axes)
        return _labelled(figure, axes, "agent steps", "replay error", log=True)


def memory_use(returns: Mapping[str, float | Sequence[float]], best: float | None = None) -> Figure:
    """Draw the return by what is done to the memory: intact, cleared, frozen, shuffled.

    Of several runs, returns are sequences: a bar is their interquartile mean, and a dot is a run.
    """
    with drawing():
        figure, axes = new_figure()
        names, runs = list(returns), [np.atleast_1d(np.asarray(each, float)) for each in returns.values()]
        values = [float(interquartile_mean(each)) for each in runs]
        colours = [BLUE if name.startswith("intact") else SOFT for name in names]
        bars = axes.bar([name.replace(", ", "\n") for name in names], values, color=colours, width=0.62)
        labels = [short_number(value, digits=3) for value in values]
        if max(map(len, runs)) > 1:
            for row, each in enumerate(runs):
                places = row + np.linspace(-0.2, 0.2, len(each))
                label = "a run" if row == 0 else None
                axes.plot(places, each, "o", color=ORANGE, markeredgecolor=PAPER, markersize=5, label=label)
            axes.set_xticks(range(len(names)), [f"{name}\n{label}" for name, label in zip(names, labels, strict=True)])
        else:
            axes.bar_label(bars, labels=labels, padding=2, color=INK, fontsize=10)
        if best is not None:
            label = f"best possible, {short_number(best, digits=3)}"
            axes.axhline(best, color=GREEN, linewidth=1.2, linestyle=(0, (4, 2)), label=label)
        if axes.get_legend_handles_labels()[1]:
            legend_above(figure, axes)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.15)
        axes.tick_params(axis="x", length=0, labelcolor=INK)
        return _labelled(figure, axes, "", "mean return, greedy")


def success_by_delay(
    points: Sequence[tuple[int, float | Sequence[float]]], horizon: int | None, chance: float | None = None
) -> Figure:
    """Draw the return against the delay, with the BPTT horizon: beyond it values carry what gradients cannot.

    Of several runs, returns are sequences: the curve is their interquartile mean, and the band holds all of them.
    """
    with drawing():
        figure, axes = new_figure()
        delays = [delay for delay, _ in points]
        runs = np.stack([np.atleast_1d(np.asarray(each, float)) for _, each in points], axis=1)
        axes.plot(delays, interquartile_mean(runs), "o-", color=BLUE, linewidth=1.6, markersize=5)
        if len(runs) > 1:
            low, high = runs.min(0), runs.max(0)
            axes.fill_between(delays, low, high, color=BLUE, alpha=0.2, linewidth=0, label="lowest to highest run")
        axes.set_xscale("log", base=2)
        if horizon is not None:
            axes.axvline(horizon, color=TEAL, linewidth=1.2, linestyle=(0, (4, 2)), label=f"BPTT horizon, {horizon}")
        if chance is not None:
            axes.axhline(chance, color=SOFT, linewidth=1.0, linestyle=(0, (4, 2)), label="best without memory")
        if axes.get_legend_handles_labels()[1]:
            legend_above(figure, axes)
        axes.set_xticks(delays, [str(delay) for delay in delays])
        axes.minorticks_off()
        axes.set_ylabel("mean return, greedy")
        axes.set_xlabel("delay in steps")
        return figure


def drift(run: Any) -> Figure:
    """Draw how far stored states are from those of the current weights, and the policy change that this causes."""
    (data,) = read_runs(run)
    with drawing():
        figure, axes = new_figure()
        for name, label, colour in (
            ("memory/drift", "drift: |stored - fresh| / |fresh|", VIOLET),
            ("memory/stale_kl", "KL that it causes, nats", ORANGE),
            ("losses/approx_kl", "KL of the update, nats", SOFT),
        ):
            steps, values = data.curve(name)
            # Rounding gives estimates of 0 and below, which have no place on a logarithmic axis.
            drawn = values > 0
            if drawn.any():
                axes.plot(steps[drawn], values[drawn], color=colour, linewidth=1.6, label=label)
        axes.set_yscale("log")
        legend_above(figure, axes)
        return _labelled(figure, axes, "agent steps", "drift, or KL", log=True)


def gradient_by_age(run: Any) -> Figure:
    """Draw how the gradient of an output spreads over the steps before it, over training."""
    (data,) = read_runs(run)
    steps, within = gradient_within(data)
    ages, shares = list(within), np.diff(np.stack([np.zeros(len(steps)), *within.values()]), axis=0)
    with drawing():
        figure, axes = new_figure(left=0.86, right=1.08)
        base, colours = np.zeros(len(steps)), _shades(len(ages))
        for number, (share, colour) in enumerate(zip(shares, colours, strict=True)):
            first = 1 if number == 0 else ages[number - 1] + 1
            label = f"{first}" if first == ages[number] else f"{first}-{ages[number]}"
            axes.fill_between(steps, base, base + share, color=BLUE, alpha=colour, linewidth=0, label=label)
            base = base + share
        axes.axhline(0.8, color=INK, linewidth=0.8, linestyle=(0, (2, 2)))
        axes.set(ylim=(0, 1), xlim=(steps[0], max(steps[-1], steps[0] + 1)))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title="steps back", reverse=True, fontsize=8.5)
        _labelled(figure, axes, "agent steps", "share of the gradient")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))
        return figure


def gradient_within(run: RunData) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Return the steps at which it was measured, and by number of steps back the share of the gradient within them.

    Numbers of steps that the newest measurement lacks, as after a change of the horizon, are left out.
    """
    ages = sorted(int(name.partition("@")[2]) for name in run.metrics if is_within(name))
    if not ages:
        return np.empty(0), {}
    measured = ~np.isnan(np.stack([run.metrics[f"gradients/within@{age}"] for age in ages]))
    newest = measured[:, measured.any(0).nonzero()[0][-1]]
    ages = [age for age, is_measured in zip(ages, newest, strict=True) if is_measured]
    steps, values = run.curves([f"gradients/within@{age}" for age in ages])
    return steps, dict(zip(ages, values, strict=True)) if len(steps) else {}


def is_within(name: str) -> bool:
    """Whether a metric is the share of the gradient within a number of steps."""
    prefix, _, age = name.partition("@")
    return prefix == "gradients/within" and age.isascii() and age.isdecimal() and len(age) < 10


def _shades(count: int) -> list[float]:
    """Opacities from the newest steps to the oldest."""
    return [0.95 - 0.8 * number / max(1, count - 1) for number in range(count)]


def timeline(run: Any) -> Figure:
    """Draw the states of a few agents over the last two rollouts of a run."""
    (data,) = read_runs(run)
    if data.timeline is None:
        raise ConfigError(f"{data.folder} has no {FILE}: a training with report=on that is not stopped writes it.")
    return state_timeline(data.timeline)


def time_split(runs: Any) -> Figure:
    """Draw the parts of the time of training: world, forward passes, copies, update, the rest."""
    data = read_runs(runs)
    with drawing():
        names = [plain(run.name, 24) for run in data] if len(data) > 1 else [""]
        left = 0.16 + 0.08 * max(map(len, names))
        figure, axes = new_figure(height=0.64 + 0.42 * max(1, len(data)), left=left)
        for row, run in enumerate(data):
            sums = phase_seconds(run)
            total, left = sum(sums.values()) or 1.0, 0.0
            for phase, seconds in sums.items():
                share = seconds / total
                axes.barh(row, share, left=left, color=PHASES[phase], height=0.6, label=phase if row == 0 else None)
                if share > 0.07:
                    axes.text(left + share / 2, row, f"{100 * share:.0f} %", ha="center", va="center", fontsize=9)
                    axes.texts[-1].set_color(PAPER)
                left += share
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5))
        axes.grid(visible=False)
        axes.tick_params(axis="both", length=0)
        axes.spines[:].set_visible(False)
        axes.set_xticks([])
        place = {"loc": "upper left", "bbox_to_anchor": (0.1, 0.46), "bbox_transform": figure.dpi_scale_trans}
        axes.legend(**place, ncols=len(PHASES), columnspacing=1.2, handlelength=1, borderaxespad=0)
        return figure


def phase_seconds(run: RunData) -> dict[str, float]:
    """Return the seconds of each part of a run's iterations."""
    return {phase: float(np.nansum(run.metrics.get(f"time/{phase}", np.zeros(1)))) for phase in PHASES}


def _labelled(figure: Figure, axes: Axes, x: str, y: str, *, log: bool = False) -> Figure:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if x:
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    if log:
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=STEPS))
    return figure


def compact(number: float) -> str:
    """Format a number of an axis: 300k, 2.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(number) < 1000 * size:
            return f"{number / size:.4g}{unit}"
    return short_number(number, digits=4)
