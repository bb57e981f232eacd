"""Sections of a report about memory: is it right, used and fresh, how far gradients reach, one agent's state."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from holdfast.check.results import Reach
from holdfast.monitor.gradients import EDGE, advice
from holdfast.report import plots, state_plots
from holdfast.report.check_page import leaks
from holdfast.report.memory_faults import audit, memory_faults
from holdfast.report.policy_measurements import EPISODES, EVALUATED, PolicyMeasurements
from holdfast.report.run_data import RunData
from holdfast.report.section import Column, Figure, Report, Section, command, html_table, make_figure, mark, number_text
from holdfast.report.theme import plain

USED = 0.1
"""Memory counts as used if clearing it costs this fraction of the return."""
ABLATIONS = {
    "cleared": "Cleared: the state is zeroed before every step.",
    "frozen": "Frozen: it stays as after an episode's first step.",
    "shuffled": f"Shuffled: agents get each other's. Frozen and shuffled are means of {EPISODES} episodes each.",
}
CAPTIONS = {
    "rollout": "By value, while it acts: memory crosses segment edges (dashed), never an episode start (red line).",
    "replay": "By value, in the update: it may cross segment edges (dashed), never an episode start (red line).",
    "gradient": "By gradient: it crosses neither segment edges nor episode starts.",
}


def is_memory_right(report: Report) -> Section:
    """Reach by value and by gradient, replay error, audit of resets."""
    run, measured = report.runs[report.shown], report.measured[report.shown]
    figures, body = list[Figure](), ""
    if measured.reach is not None:
        agent = state_plots.agent_to_show(measured.reach)
        for panel in _panels(measured.reach):
            change = getattr(measured.reach, panel)[:, agent].double().numpy()
            outputs, observations = np.meshgrid(np.arange(change.shape[1]), np.arange(change.shape[0]))
            data = {"observation": observations.ravel(), "output": outputs.ravel(), "change": change.ravel()}
            figure, alt = state_plots.reach(measured.reach, panel, agent), f"Reach {state_plots.TITLES[panel]}"
            figures.append(make_figure(f"reach_{panel}", figure, CAPTIONS[panel], data, alt))
        body += (
            "<p class='soft'>Reach is measured on the trained policy, in float64, with scripted observations: one is "
            "changed, and blue cells are the outputs that change, the deeper the more. Empty cells are exactly 0, grey "
            f"ones steps without an agent, red ones not allowed. {command('check', run)} measures every law.</p>"
        )
    else:
        reason = escape(plain(measured.notes.get("reach", "The reach was not measured."), 400))
        body += f"<p>{reason} {command('check', run, '--html')} measures it.</p>"
    figures += _replay_figure(run)
    if not len(run.curve("memory/replay_error")[0]):
        body += "<p class='soft'>Replay error: not measured, metrics.jsonl has no memory/replay_error.</p>"
    body += _audit_of_all(report) if len(report.runs) > 1 else _audit_of_one(run, measured)
    return Section("right", "Is memory right?", escape(_right(report)), figures, body, "square")


def _panels(reach: Reach) -> list[str]:
    """Return the panels to draw: by value and by gradient; both ways of acting only if one leaks."""
    by_value = [panel for panel in ("rollout", "replay") if bool(leaks(reach, panel).any())]
    return [*(by_value or ["rollout"]), "gradient"]


def _right(report: Report) -> str:
    if report.faults:
        return f"Memory is not right. {report.faults[0]}."
    rows = [row for run in report.runs for row in audit(run)]
    if not rows and all(each.reach is None for each in report.measured):
        return "Not known: nothing about the memory was measured."
    parts = []
    if any(each.reach is not None for each in report.measured):
        parts.append("nothing crosses an episode start, and no gradient crosses a segment edge")
    parts += [row.words for row in audit(report.run) if row.words]
    return f"Memory is right as far as it was measured: {'; '.join(parts)}."


def _audit_of_one(run: RunData, measured: PolicyMeasurements) -> str:
    rows = [
        [
            f"{mark(row.ok)} {escape(row.what)} <small>{escape(row.where)}</small>",
            _unbroken(row.measured),
            _unbroken(row.bound),
        ]
        for row in audit(run)
    ]
    return html_table(("", "measured", "must be"), rows) if rows else ""


def _audit_of_all(report: Report) -> str:
    """Return a table with a row for each run; the reach of one of them is drawn."""
    names = {row.name: row for run in report.runs for row in audit(run)}
    head = ("run", "reach", *(f"{row.name}, {row.bound}" for row in names.values()))
    rows = []
    for run, measured in zip(report.runs, report.measured, strict=True):
        ok = None if measured.reach is None else not [fault for fault in memory_faults(run, measured) if fault.of_reach]
        words = {None: "not measured", True: "no leak", False: "leaks"}[ok]
        cells = {row.name: f"{mark(row.ok)} {_unbroken(row.short)}" for row in audit(run)}
        reach = f"<span class='number'>{mark(ok)} {words}</span>"
        rows.append([escape(plain(run.name)), reach, *(cells.get(name, "-") for name in names)])
    shown = escape(plain(report.runs[report.shown].name))
    return f"<p class='soft'>The reach and the replay error above are those of {shown}.</p>{html_table(head, rows)}"


def _unbroken(text: str) -> str:
    """Return text as HTML in which numbers such as 1e-4 stay on one line."""
    return re.sub(r"\de-\d+", r"<span class='number'>\g<0></span>", escape(text))


def _replay_figure(run: RunData) -> list[Figure]:
    steps, errors = run.curve("memory/replay_error")
    if not len(steps):
        return []
    data = {"agent steps": steps, "ratio error": errors}
    value_steps, values = run.curve("memory/replay_value_error")
    data |= {"value error": values} if len(value_steps) == len(steps) else {}
    caption = (
        "Difference between what the update computes before any weight changed and what the rollout computed: PPO's "
        "first ratio is 1."
    )
    return [make_figure("replay_error", plots.replay_error(run), caption, data, "Replay error over training")]


def is_memory_used(report: Report) -> Section:
    """Returns with memory intact, cleared, frozen and shuffled; returns by delay."""
    name, title, group = "used", "Is memory used?", report.groups[0]
    of_runs, run, first = report.name_of(*group), report.run, report.measured[0]
    if not first.has_memory:
        return Section(name, title, "The policy has no memory.", of=of_runs)
    table = [_returns(report.runs[number], report.measured[number]) for number in group]
    returns = {mode: [each[mode] for each in table] for mode in table[0] if all(mode in each for each in table)}
    figures, body = [], ""
    names = [plain(report.runs[number].name) for number in group] if len(group) > 1 else ["return"]
    if returns:
        figure = plots.memory_use(returns, first.best)
        caption = " ".join(text for mode, text in ABLATIONS.items() if mode in returns)
        data: dict[str, Column] = {"memory": list(returns)}
        data |= {name: [each[row] for each in returns.values()] for row, name in enumerate(names)}
        figures.append(make_figure("memory_use", figure, caption, data, "Return by what is done to the memory"))
    points = _common([report.measured[number].delays for number in group])
    if points:
        figure = plots.success_by_delay(points, run.number("trainer", "bptt_horizon"), first.best_without_memory)
        trained = json.dumps(run.value("world", "delay"))
        caption = (
            f"Trained with a delay of {plain(trained, 30)}; {EPISODES} episodes each. Beyond the BPTT horizon no "
            "gradient reaches the cue; values still do."
        )
        data = {"delay": [delay for delay, _ in points]}
        data |= {name: [each[row] for _, each in points] for row, name in enumerate(names)}
        figures.append(make_figure("return_by_delay", figure, caption, data, "Return by delay"))
    for key, text in (("returns", "Frozen and shuffled memory"), ("delays", "Return by delay")):
        note = first.notes.get(key)
        if note is not None and "no delay" not in note:
            body += f"<p class='soft'>{escape(text)}: {escape(plain(note, 400))}</p>"
    means = {mode: float(plots.interquartile_mean(np.array(values))) for mode, values in returns.items()}
    if not returns:
        body += f"<p>{command('eval', run, '--memory', 'all')} measures it.</p>"
    return Section(name, title, escape(_used(means)), figures, body, of=of_runs)


def _returns(run: RunData, measured: PolicyMeasurements) -> Mapping[str, float]:
    """Return the returns by memory mode; without a measurement those of the final evaluation."""
    evaluated = {mode: run.last(metric) for mode, metric in EVALUATED.items()}
    return measured.returns or {mode: value for mode, value in evaluated.items() if value is not None}


def _common(curves: Sequence[Sequence[tuple[int, float]]]) -> list[tuple[int, list[float]]]:
    """Return the delays that all runs were measured at, with the return of each run."""
    tables = [dict(curve) for curve in curves]
    return [(delay, [table[delay] for table in tables]) for delay, _ in curves[0] if all(delay in t for t in tables)]


def _used(returns: Mapping[str, float]) -> str:
    intact, cleared = returns.get("intact"), returns.get("cleared")
    if intact is None or cleared is None:
        return "Not known: there is no evaluation with memory intact and cleared."
    numbers = f"{number_text(intact)} intact, {number_text(cleared)} cleared"
    if intact - cleared > USED * max(abs(intact), abs(cleared)):
        return f"Memory is used: {numbers}."
    return (
        f"Clearing the memory costs little: {numbers}. The policy does not need it here, or has not learned to use it."
    )


def is_memory_fresh(report: Report) -> Section:
    """Drift of stored states from those of the current weights."""
    name, title, run = "fresh", "Is memory fresh?", report.run
    steps, values = run.curve("memory/drift")
    if not len(steps):
        text = "Not measured: metrics.jsonl has no memory/drift, which every training of a policy with memory writes."
        return Section(name, title, escape(text))
    last, kl, update = float(values[-1]), run.last("memory/stale_kl"), run.last("losses/approx_kl")
    lead = f"After the last update, stored states are {100 * last:.0f} % away from those of the new weights"
    if kl is not None and update is not None and update > 0:
        size = "less than" if kl < 0.5 * update else "more than" if kl > 2 * update else "about as much as"
        lead += (
            f", which changes the policy {size} the update itself: KL {number_text(kl)} against {number_text(update)}"
        )
    hint = "" if last < 0.2 else " trainer.stale=recompute computes them again."
    data = {"agent steps": steps, "drift": values, "stale KL": run.curve("memory/stale_kl")[1]}
    caption = (
        "Does a state from before an update still mean the same? Drift is the relative distance of stored entry "
        "states from those that the current weights compute for the same steps."
    )
    figure = make_figure("drift", plots.drift(run), caption, data, "Drift of stored states over training")
    return Section(name, title, escape(f"{lead}.{hint}"), [figure], of=report.name_of(0))


def gradient_reach(report: Report) -> Section:
    """How many steps back gradients reach."""
    name, title, run = "gradients", "How far do gradients reach?", report.run
    reach, horizon = run.last("memory/gradient_reach"), run.number("trainer", "bptt_horizon")
    steps, within = plots.gradient_within(run)
    if reach is None or horizon is None or not within:
        text = "Not measured; trainer.monitor=every:10 measures it in every tenth iteration."
        return Section(name, title, escape(text))
    edge = (
        " It is cut off by the segment edge: a longer trainer.bptt_horizon may help." if reach >= EDGE * horizon else ""
    )
    lead = f"80 % of the gradient lies within {reach:.0f} of {horizon} steps.{edge}"
    hint = advice(int(reach), horizon) if reach < EDGE * horizon else ""
    data: dict[str, Column] = {"agent steps": steps}
    data |= {f"within {age} steps": shares for age, shares in within.items()}
    caption = f"Share of the gradient of an output by the number of steps back. {hint and hint[0].upper() + hint[1:]}"
    figure = make_figure("gradient_by_age", plots.gradient_by_age(run), caption, data, "Gradient by steps back")
    return Section(name, title, escape(lead), [figure], of=report.name_of(0))


def state_of_one_agent(report: Report) -> Section:
    """The timeline of a few agents' states, and one of them line by line."""
    name, title, run = "life", "What happens to one agent's state?", report.run
    timeline = run.timeline
    if timeline is None:
        text = (
            "Not recorded. A training that reaches its last iteration, with report=on, records its last two rollouts."
        )
        return Section(name, title, escape(text))
    starts = sum(len(agent.starts) for agent in timeline.agents)
    steps, count = len(timeline.agents[0].norms), len(timeline.agents)
    began = f"began {starts} episode{'s' * (starts != 1)}, each with a cleared state" if starts else "began no episode"
    lead = (
        f"Over {steps} steps, {count} agent{'s' * (count > 1)} {began}; states are carried across segment edges, where "
        "gradients are cut."
    )
    caption = (
        "A row is an agent, and the deeper the blue the larger its state. Red: an episode starts, after a termination "
        "(filled) or a truncation (hollow). Dashed: segment edge. Violet: the weights were updated; below, how far "
        "states are from those that the new weights compute."
    )
    data: dict[str, Column] = {"step": [timeline.first_step + step for step in range(steps)]}
    data |= {f"agent {agent.agent} |state|": agent.norms for agent in timeline.agents}
    figure = make_figure("state_timeline", state_plots.state_timeline(timeline), caption, data, "Timeline of states")
    trace = ""
    if timeline.trace:
        lines = escape("\n".join(plain(line, 300) for line in timeline.trace[:400]))
        trace = f"<details><summary>One agent, line by line</summary><pre>{lines}</pre></details>"
    return Section(name, title, escape(lead), [figure], trace, "wide", report.name_of(0))
