"""The page of a sweep: history, importances, the Pareto front and all trials, in one HTML file."""

from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from html import escape
from io import BytesIO
from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from holdfast.errors import writing
from holdfast.report.check_page import PAGE, STYLE
from holdfast.sweep.results import TrialResult, best_of, pareto_front, shown
from holdfast.sweep.settings import SweepSettings
from holdfast.sweep.space import Dimension
from holdfast.version import __version__

FILE = "sweep.html"
INK, BEST, PRUNED, FAILED, FRONT = "#1f63a8", "#16793a", "#9aa4b0", "#c20d22", "#e08700"
Draw = Callable[[Axes], None]


def write_page(
    folder: Path, settings: SweepSettings, results: Sequence[TrialResult], importances: Mapping[str, float]
) -> Path:
    """Write the page of a sweep."""
    file = folder / FILE
    with writing(file):
        file.write_text(sweep_page(folder.name, settings, results, importances), encoding="utf-8")
    return file


def sweep_page(
    name: str, settings: SweepSettings, results: Sequence[TrialResult], importances: Mapping[str, float]
) -> str:
    """Return the page of a sweep."""
    best = best_of(results)
    if best is None:
        verdict = '<p class="verdict bad">No trial is finished.</p>'
        figures = ""
    else:
        text = f"Best is trial {best.index}: return {shown(best.score)}, {best.describe()}"
        verdict = f'<p class="verdict good">{escape(text)}</p>'
        figures = _figures(settings.dimensions, results, best, importances)
    body = [verdict, f"<p>{escape(_description(settings, results))}</p>", figures, _table(settings, results, best)]
    title = escape(f"Sweep {name}")
    page = PAGE.format(title=title, style=STYLE, body="\n".join(body), version=escape(__version__))
    return page.replace(", on scripted observations and actions, on the CPU.", ".")


def _description(settings: SweepSettings, results: Sequence[TrialResult]) -> str:
    counts = {state: sum(result.state == state for result in results) for state in ("finished", "pruned", "failed")}
    states = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    keys = " ".join(f"{key}={value}" for key, value in settings.keys.items())
    seeds = f"{settings.seeds} seeds" if settings.seeds > 1 else "one seed"
    return (
        f"Recipe {settings.recipe} {keys}. {len(results)} trials of {seeds}: {states or 'none is over'}. The return of "
        "a trial is the interquartile mean over its seeds of the greedy return in held-out episodes; its cost, the "
        "seconds of training of all its seeds (of the CPU, or on a GPU), without evaluation."
    )


def _figures(
    dimensions: Sequence[Dimension], results: Sequence[TrialResult], best: TrialResult, importances: Mapping[str, float]
) -> str:
    history = _figure("History", "Returns of the trials, and the best so far", lambda ax: _draw_history(ax, results))
    text = "Which keys explain the differences of return (PED-ANOVA)"
    important = _figure("Importances", text, lambda ax: _draw_importances(ax, importances)) if importances else ""
    front = _figure("Return and cost", "Returns of the trials over their cost", lambda ax: _draw_front(ax, results))
    keys = "".join(
        _figure(key.key, f"Returns of the trials over {key}", lambda ax, key=key: _draw_key(ax, results, best, key))
        for key in dimensions
    )
    return history + front + important + keys


def _figure(title: str, text: str, draw: Draw) -> str:
    figure = Figure(figsize=(9, 3.2), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.grid(color="#e4e8ec", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    draw(ax)
    buffer = BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    data = b64encode(buffer.getvalue()).decode()
    image = f'<img alt="{escape(text)}" src="data:image/svg+xml;base64,{data}">'
    return f"<h2>{escape(title)}</h2>\n<figure>{image}</figure>\n"


def _draw_history(ax: Axes, results: Sequence[TrialResult]) -> None:
    scored = [result for result in results if result.score is not None]
    scores = [result.score or 0.0 for result in scored]
    ax.plot([result.index for result in scored], scores, "o", color=INK, label="finished")
    ax.step([result.index for result in scored], list(accumulate(scores, max)), where="post", color=BEST, label="best")
    for state, colour in (("pruned", PRUNED), ("failed", FAILED)):
        indices = [result.index for result in results if result.state == state]
        if indices:
            # At the lower edge: they have no return.
            edge = ax.get_xaxis_transform()
            ax.plot(indices, [0.02] * len(indices), "x", color=colour, label=state, transform=edge, clip_on=False)
    ax.set(xlabel="trial", ylabel="return")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_front(ax: Axes, results: Sequence[TrialResult]) -> None:
    scored = [result for result in results if result.score is not None and result.cost is not None]
    ax.plot([result.cost or 0.0 for result in scored], [result.score or 0.0 for result in scored], "o", color=INK)
    front = pareto_front(results)
    costs, scores = [result.cost or 0.0 for result in front], [result.score or 0.0 for result in front]
    ax.plot(costs, scores, "o-", drawstyle="steps-post", color=FRONT, label="Pareto front")
    for result in front:
        place = (result.cost or 0.0, result.score or 0.0)
        ax.annotate(f"{result.index}", place, xytext=(5, -11), textcoords="offset points", fontsize=9)
    ax.margins(0.1)
    ax.set(xlabel="cost in seconds, all seeds", ylabel="return")
    ax.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_importances(ax: Axes, importances: Mapping[str, float]) -> None:
    names = sorted(importances, key=lambda name: importances[name])
    ax.barh(names, [importances[name] for name in names], color=INK, height=0.5)
    ax.set(xlabel="importance", ylim=(-0.6, max(len(names) - 0.4, 1.6)))


def _draw_key(ax: Axes, results: Sequence[TrialResult], best: TrialResult, dimension: Dimension) -> None:
    # A damaged study may have lost the value of a trial.
    key = dimension.key
    scored = [result for result in results if result.score is not None and key in result.values]
    values = [result.values[key] for result in scored]
    if dimension.log:
        ax.set_xscale("log")
    # Choices lie in the order in which they were typed, also those that no finished trial has.
    ax.plot(dimension.choices, [best.score or 0.0] * len(dimension.choices), alpha=0)
    ax.plot(values, [result.score or 0.0 for result in scored], "o", color=INK)
    ax.plot([best.values[key]], [best.score or 0.0], "o", color=BEST)
    ax.set(xlabel=key, ylabel="return")


def _table(settings: SweepSettings, results: Sequence[TrialResult], best: TrialResult | None) -> str:
    keys = [dimension.key for dimension in settings.dimensions]
    head = "".join(f"<th>{escape(column)}</th>" for column in ("trial", "", "return", "cost / s", *keys, "runs"))
    front = {result.index for result in pareto_front(results)}
    rows = "\n".join(_row(result, keys, best, result.index in front) for result in results)
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<h2>Trials</h2>\n<div class="scroll"><table>\n{inside}</table></div>'


def _row(result: TrialResult, keys: Sequence[str], best: TrialResult | None, in_front: bool) -> str:
    state = result.state + (", best" if best is not None and best.index == result.index else "")
    state += (", in the front" if in_front else "") + (", second attempt" if result.attempts > 1 else "")
    words = f'<span class="words">{escape(result.error)}</span>' if result.error else ""
    score = "" if result.score is None else shown(result.score)
    cost = "" if result.cost is None else f"{result.cost:.1f}"
    numbers = (str(result.index), score, cost, *(shown(result.values.get(key, "")) for key in keys))
    first, *rest = (f'<td class="number">{escape(text)}</td>' for text in numbers)
    runs = ", ".join(f"{name} ({shown(run['return'])})" for name, run in result.runs.items())
    return f"<tr>{first}<td>{escape(state)}{words}</td>{''.join(rest)}<td>{escape(runs)}</td></tr>"
