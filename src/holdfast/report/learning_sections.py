"""Sections of a report about the run: what it was, what it learned, where its time went, how to repeat it."""

from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np

from holdfast.config.sizes import format_bytes
from holdfast.report import plots
from holdfast.report.recipe_difference import recipe_difference
from holdfast.report.run_data import RunData, group_label
from holdfast.report.section import Column, Report, Section, command, html_table, make_figure, number_text
from holdfast.report.text import clock
from holdfast.report.theme import plain

MAX_GROUPS, MAX_SENTENCES = 8, 3
"""Groups of runs in a table, and in a sentence."""
FACTS = {
    "agents": ("world", "agents"),
    "BPTT horizon": ("trainer", "bptt_horizon"),
    "batch": ("trainer", "batch_size"),
    "minibatch": ("trainer", "minibatch_size"),
    "epochs": ("trainer", "update_epochs"),
    "learning rate": ("trainer", "optimizer", "learning_rate"),
    "gamma": ("trainer", "ppo", "gamma"),
}
"""Keys that every run has, which say most about it."""


def what_was_run(report: Report) -> Section:
    """Difference from the recipe, and the sizes."""
    run, firsts = report.run, [report.runs[group[0]] for group in report.groups][:MAX_GROUPS]
    recipe, rows = recipe_difference(firsts)
    # Of runs that differ in their seed alone, the seeds are in another table.
    rows = [row for row in rows if row[0] != "seed"] if len(report.runs) > 1 else rows
    if recipe is None:
        sentence = "The config of this run cannot be compared with a recipe"
    elif rows:
        sentence = f"The recipe {recipe}, with {len(rows)} key{'s' * (len(rows) > 1)} changed"
    else:
        sentence = f"The recipe {recipe}, with no key changed"
    seeds = {str(each.value("seed")) for each in report.runs}
    several = f" · {len(report.runs)} runs, {len(seeds)} seed{'s' * (len(seeds) > 1)}" if len(report.runs) > 1 else ""
    labels = [plain(group_label([report.runs[number] for number in group]), 36) for group in report.groups]
    head = ("key", "recipe", *(labels[:MAX_GROUPS] if len(report.runs) > 1 else ["this run"]))
    body = html_table(head, [[escape(plain(cell, 200)) for cell in row] for row in rows]) if rows else ""
    if len(report.runs) > 1:
        names = ("run", "policy", "world", "steps", "time", "seed")
        body += html_table(names, [_run_row(each) for each in report.runs])
    facts = [f"{name} {number_text(run.value(*keys), 4)}" for name, keys in FACTS.items() if _is_size(run.value(*keys))]
    body += f"<p class='soft'>{escape(' · '.join(facts))}</p>" if facts and len(report.groups) == 1 else ""
    problems = [f"{plain(each.name)}: {plain(problem, 300)}" for each in report.runs for problem in each.problems]
    if problems:
        body += f"<ul class='notes'>{''.join(f'<li>{escape(problem)}</li>' for problem in problems)}</ul>"
    return Section("run", "What was run", escape(f"{sentence}{several}."), body=body)


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e15


def _run_row(run: RunData) -> list[str]:
    seconds = run.last("seconds")
    cells = [plain(run.name), plain(run.text("policy", "name")), plain(run.text("world", "name"))]
    cells += [number_text(run.last("global_step"), 12), clock(seconds or 0) if (seconds or 0) < 1e9 else "-"]
    return [escape(cell) for cell in [*cells, plain(str(run.value("seed")), 20)]]


def did_it_learn(report: Report) -> Section:
    """Return over steps and over time; evaluations."""
    name, title = "learned", "Did it learn?"
    curves = plots.grouped_curves(report.runs, "charts/episodic_return", "global_step")
    if not curves:
        text = "No episode ended in training, so there is no return; longer episodes need a larger trainer.batch_size."
        return Section(name, title, escape(text))
    figures = []
    for x, (metric, axis) in plots.X_AXES.items():
        data = dict[str, Column]()
        for label, (grid, middle, low, high) in plots.grouped_curves(
            report.runs, "charts/episodic_return", metric
        ).items():
            prefix = f"{plain(label)} " if len(curves) > 1 else ""
            data |= {f"{prefix}{axis}": grid, f"{prefix}return": middle}
            data |= {f"{prefix}low": low, f"{prefix}high": high} if (high > low).any() else {}
        band = "Interquartile mean over runs; the band is its 95 % interval. " if len(report.runs) > 1 else ""
        caption = f"{band}Mean return of the episodes that ended, over {axis}."
        figure = plots.learning_curve(report.runs, x)
        figures.append(make_figure(f"return_over_{x}", figure, caption, data, f"Return over {axis}"))
    return Section(name, title, escape(_learned(report, curves)), figures, _evaluations(report))


def _learned(report: Report, curves: Mapping[str, Any]) -> str:
    """Say in words how the return changed, and how the policy plays now."""
    changes = [(label, *_change(middle)) for label, (_, middle, _, _) in list(curves.items())[:MAX_SENTENCES]]
    if len(report.runs) > 1:
        label, verb, values = changes[0]
        others = [f"of {plain(name)} {verb} {values}" for name, verb, values in changes[1:]]
        text = "; ".join([f"The return of {plain(label)} {verb} {values}", *others])
        greedy = [report.runs[number].last("eval/return_mean") for number in report.groups[0]]
        scores = np.array([score for score in greedy if score is not None])
        if len(scores) < 2:
            return f"{text}."
        mean = number_text(float(plots.interquartile_mean(scores)))
        name = plain(group_label([report.runs[number] for number in report.groups[0]]))
        return f"{text}. Greedy evaluation of {name}: interquartile mean {mean}."
    start = f"The return {changes[0][1]} {changes[0][2]}"
    words = [f"{number_text(value)} {word}" for word, value in _scores(report.run).items() if value is not None]
    best = report.measured[0].best
    best_text = f"; the best possible is {number_text(best)}" if best is not None and words else ""
    return f"{start}. Evaluation: {', '.join(words)}{best_text}." if words else f"{start}."


def _change(curve: np.ndarray) -> tuple[str, str]:
    """Return how a curve changed, and from what to what."""
    part = max(1, len(curve) // 20)
    first, last = float(curve[:part].mean()), float(curve[-part:].mean())
    size = max(abs(first), abs(last))
    verb = "rose" if last - first > 0.05 * size else "fell" if first - last > 0.05 * size else ""
    numbers = f"from {number_text(first)} to {number_text(last)}"
    return (verb, numbers) if verb else ("did not change", f"from {number_text(first)}")


def _scores(run: RunData) -> dict[str, float | None]:
    return {"greedy": run.last("eval/return_mean"), "sampled": run.last("eval/sampled_return_mean")}


def _evaluations(report: Report) -> str:
    """Return the table of evaluations: greedy, sampled, memory cleared; of several runs or worlds each."""
    rows = []
    for run in report.runs:
        labels = [name.partition("@")[2] for name in run.metrics if name.partition("@")[0] == "eval/return_mean"]
        for label in labels:
            at = f"@{label}" if label else ""
            names = ("eval/return_mean", "eval/sampled_return_mean", "eval/return_mean_memory_cleared")
            numbers = [number_text(run.last(f"{name}{at}"), 4) for name in names]
            rows.append([escape(plain(run.name)), escape(plain(label or run.text("world", "name"))), *numbers])
    if not rows:
        return f"<p class='soft'>There is no evaluation; {command('eval', report.run)} measures one.</p>"
    head = ("run", "world", "greedy", "sampled", "greedy, memory cleared")
    first = 0 if len(report.runs) > 1 else 1 if len(rows) > 1 else 2
    return html_table(head[first:], [row[first:] for row in rows])


def where_time_goes(report: Report) -> Section:
    """Parts of the time of training; bytes."""
    name, title, run = "time", "Where does the time go?", report.run
    seconds = plots.phase_seconds(run)
    if not sum(seconds.values()) > 0:
        return Section(name, title, "Not measured: metrics.jsonl has no times.")
    longest = max(seconds, key=lambda phase: seconds[phase])
    share = 100 * seconds[longest] / sum(seconds.values())
    words = {"world": "the world", "forward": "forward passes of the rollout", "copy": "copies", "update": "the update"}
    speed = run.last("charts/SPS")
    of_run = f" of {plain(run.name)}" if len(report.runs) > 1 else ""
    lead = f"{share:.0f} % of the time{of_run} goes into {words.get(longest, 'checks, monitors and files')}"
    lead += f"; {speed:,.0f} agent steps a second at the end." if speed is not None else "."
    data: dict[str, Column] = {"run": [plain(each.name) for each in report.runs]}
    data |= {phase: [plots.phase_seconds(each)[phase] for each in report.runs] for phase in seconds}
    caption = (
        "Wall-clock time of all iterations: stepping the world; the policy's forward passes in the rollout; copies "
        "between them; the update; checks, monitors and files."
    )
    figure = make_figure("time_split", plots.time_split(report.runs), caption, data, "Parts of the time")
    sizes = {
        "rollout buffer": run.last("memory/buffer_bytes"),
        "states of all agents": run.last("memory/state_bytes"),
        "saved for the backward pass": run.last("memory/graph_bytes"),
    }
    rows = [[escape(what), escape(format_bytes(int(size)))] for what, size in sizes.items() if size is not None]
    return Section(name, title, escape(lead), [figure], html_table(("held in memory", "size"), rows) if rows else "")


def how_to_reproduce(report: Report) -> Section:
    """The command, and how to go on."""
    run = report.run
    text = "\n".join(plain(line, 2000) for line in run.command.splitlines()[:60])
    typed = f"<pre>{escape(text)}</pre>" if text else "<p class='soft'>command.txt is missing.</p>"
    more = "".join(
        f"<li>{what}: {command(verb, run, *options)}</li>"
        for what, verb, *options in (
            ("measure every law of memory", "check"),
            ("evaluate with confidence intervals", "eval", "--memory", "all", "--actions", "both"),
            ("write this page again", "report"),
        )
    )
    lead = "The same command with the same versions gives the same numbers, bit for bit, on the same machine."
    return Section(
        "reproduce", "How to reproduce it", lead, of=report.name_of(0), body=f"{typed}<ul class='notes'>{more}</ul>"
    )
