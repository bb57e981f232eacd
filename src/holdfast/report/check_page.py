"""The HTML page of a check, and its plot of reach: which outputs change with the observation of each step."""

from base64 import b64encode
from collections.abc import Callable
from dataclasses import replace
from html import escape
from io import BytesIO

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, LogNorm, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from holdfast.check import Law, Laws, Measurement
from holdfast.check.laws import LAWS
from holdfast.check.results import Reach
from holdfast.report.check_report import UNEXPLAINED, bound, number, split_finding, summary
from holdfast.types import Bool, Float, Tensor
from holdfast.version import __version__

IN_WORDS = {name: law.__doc__ or "" for name, law in LAWS.items()}

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{body}
<footer>Measured by holdfast {version}, on scripted observations and actions, on the CPU.</footer>
</main>
</body>
</html>
"""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #ffffff; --card: #f6f8fa;
  --line: #d4dae1; --good: #16793a; --good-card: #e3f6e8; --bad: #c20d22; --bad-card: #ffebec; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebef; --soft: #9aa4b0; --paper: #12161b;
  --card: #1c2229; --line: #343c46; --good: #5fd283; --good-card: #12301d; --bad: #ff7f86;
  --bad-card: #3a1519; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2rem 1.5rem 3rem; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .7rem; }
h3 { font-size: 1rem; margin: 0 0 .6rem; } h3 .soft { font-weight: 400; }
.verdict { padding: .8rem 1.1rem; border-radius: 8px; font-size: 1.1rem; font-weight: 600; }
.verdict.good { background: var(--good-card); color: var(--good); }
.verdict.bad { background: var(--bad-card); color: var(--bad); }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 1.4rem; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .85rem; }
th, td { padding: .5rem .9rem .5rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.mark { font-weight: 700; }
td .words { display: block; color: var(--soft); font-size: .9rem; }
td details { font-size: .9rem; } summary { cursor: pointer; }
details ul { margin: .4rem 0 0; padding-left: 1.1rem; } details li { margin: .15rem 0; }
.card { background: var(--card); border-left: 4px solid var(--bad); border-radius: 6px;
  padding: 1rem 1.2rem; margin: 0 0 1rem; }
dl { display: grid; grid-template-columns: 6rem 1fr; gap: .35rem 1rem; margin: 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
dd.write { background: var(--paper); border: 1px solid var(--line); border-radius: 4px;
  padding: .35rem .6rem; font: .9rem/1.45 ui-monospace, monospace; }
figure { margin: 0; } figure img { width: 100%; height: auto; display: block; background: #fff;
  border: 1px solid var(--line); border-radius: 6px; }
.legend { margin: .9rem 0 0; padding-left: 1.2rem; }
footer { margin-top: 2.5rem; color: var(--soft); font-size: .85rem; }
"""

LEGEND = (
    "Each row is one experiment: the observation of that step is changed, and colour shows which steps' "
    "outputs change. The third panel shows gradients of each step's outputs with respect to each "
    "observation, in replayed segments.",
    "White is exactly 0. Blue is a change, the darker the larger. The black line encloses where a change is "
    "allowed: later in the same episode; for gradients, in the same segment too.",
    "Red is a change that is not allowed: across an episode start, before the observation, or, for "
    "gradients, across a segment edge.",
    "Orange outlines a missing change.",
    "Triangles mark the agent's episode starts, where the state must be cleared; dotted lines mark segment "
    "edges; grey steps are invalid.",
)
MISSING_WITHIN = 8
"""Steps within which the absence of a change is drawn."""


def check_page(laws: Laws, title: str) -> str:
    """Return the results as one self-contained HTML page."""
    kind, mark = ("good", "✓") if laws.ok else ("bad", "✗")
    body = [f'<p class="verdict {kind}">{mark} {escape(summary(laws))}</p>', _table(laws)]
    broken = {name: law for name, law in laws.items() if not law.ok}
    if broken:
        body += ["<h2>Broken laws and fixes</h2>", *(_card(name, law) for name, law in broken.items())]
    if laws.notes:
        notes = "".join(f"<li>{escape(note)}</li>" for note in laws.notes)
        body.append(f"<h2>Notes</h2>\n<ul>{notes}</ul>")
    if laws.reach is not None:
        body.append(_figure(laws.reach))
    return PAGE.format(title=escape(title), style=STYLE, body="\n".join(body), version=escape(__version__))


def _table(laws: Laws) -> str:
    head = "".join(f"<th>{column}</th>" for column in ("law", "measured", "bound", "", "what was measured"))
    rows = "\n".join(_row(name, law) for name, law in laws.items())
    inside = f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>"
    return f'<div class="scroll"><table>\n{inside}</table></div>'


def _row(name: str, law: Law) -> str:
    words = f'<strong>{escape(name)}</strong><span class="words">{escape(IN_WORDS[name])}</span>'
    numbers = f'<td class="number">{number(law.measured)}</td><td class="number">{escape(bound(law.worst))}</td>'
    return f"<tr><td>{words}</td>{numbers}<td class='mark'>{_mark(law.ok)}</td><td>{_parts(law)}</td></tr>"


def _parts(law: Law) -> str:
    """Show the worst measurement, and all of them on demand."""
    what = escape(law.worst.what)
    if len(law.parts) == 1:
        return what
    items = "".join(f"<li>{_part(part)}</li>" for part in law.parts)
    return f"{what}<details><summary class='soft'>all {len(law.parts)} measurements</summary><ul>{items}</ul></details>"


def _part(part: Measurement) -> str:
    line = f"{_mark(part.ok)} {escape(part.what)}: {number(part.measured)} ({escape(bound(part))})"
    return line if part.ok else f"{line}<br><span class='soft'>{escape(part.finding)}</span>"


def _mark(ok: bool) -> str:
    return '<span class="good">✓</span>' if ok else '<span class="bad">✗</span>'


def _card(name: str, law: Law) -> str:
    first, *rest = law.broken
    where, size = split_finding(first)
    more = f' <span class="soft">and {len(rest)} more like it, in the table</span>' if rest else ""
    terms = {
        "measured": escape(first.what) + more,
        "where": escape(where),
        "size": escape(size),
        "pattern": escape(law.pattern.name if law.pattern else UNEXPLAINED),
    }
    rows = "\n".join(f"<dt>{term}</dt><dd>{text}</dd>" for term, text in terms.items())
    if law.pattern:
        rows += f'\n<dt>write</dt><dd class="write">{escape(law.pattern.write)}</dd>'
    words = f'<span class="soft">{escape(IN_WORDS[name])}</span>'
    head = f'<h3><span class="bad">✗ {escape(name)}</span> {words}</h3>'
    return f'<section class="card">{head}\n<dl>{rows}</dl></section>'


def _figure(reach: Reach) -> str:
    agent = agent_with_most_leaks(reach)
    data = b64encode(reach_png(reach, agent, dpi=170)).decode()
    alt = f"Which outputs of agent {agent} change with the observation of each step"
    legend = "".join(f"<li>{escape(line)}</li>" for line in LEGEND)
    return (
        f'<h2>Reach of observations and gradients</h2>\n<figure><img alt="{alt}" '
        f'src="data:image/png;base64,{data}">\n'
        f'<figcaption><ul class="legend">{legend}</ul></figcaption></figure>'
    )


WRONG, MISSING, ALLOWED, EDGE = "#d3001c", "#e08700", "#1a1a1a", "#9a9a9a"
INVALID, NOT_FINITE = "#e4e4e4", "#c000c0"
CHANGED = LinearSegmentedColormap.from_list("changed", ["#c3ddf2", "#5b9fd3", "#1f63a8", "#06204d"])
LEAKED = LinearSegmentedColormap.from_list("leaked", ["#ffc9c4", "#ff7f78", "#d3001c", "#5c000c"])
SPAN = 1e-9
"""Values below this share of the largest have the colour of the smallest."""

Cells = Callable[[Reach, str], Bool[Tensor, "N A N"]]
"""Selects cells of a panel."""

PANELS = {"rollout": "information, rollout", "replay": "information, replay", "gradient": "gradient, replay"}


def may_reach(reach: Reach, panel: str) -> Bool[Tensor, "N A N"]:
    """Return where a change is allowed: from a valid step to later ones of its episode, gradients of its segment."""
    episode = reach.clears.cumsum(-1)
    steps = torch.arange(reach.clears.shape[-1])
    allowed = (episode.T[:, :, None] == episode[None]) & (steps[:, None] <= steps)[:, None]
    allowed &= reach.valid.T[:, :, None]
    if panel == "gradient":
        segment = steps // reach.horizon
        allowed &= (segment[:, None] == segment)[:, None]
    return allowed


def leaks(reach: Reach, panel: str) -> Bool[Tensor, "N A N"]:
    """Return changes that are not allowed or not finite."""
    change = getattr(reach, panel)
    return ((change != 0) & ~may_reach(reach, panel)) | ~change.isfinite()


def missing(reach: Reach, panel: str) -> Bool[Tensor, "N A N"]:
    """Return missing changes within a few steps, unless there is no memory or the panel is empty."""
    change, valid = getattr(reach, panel), reach.valid
    steps = torch.arange(change.shape[0])
    later = steps - steps[:, None]
    soon = ((later > 0) & (later <= MISSING_WITHIN))[:, None]
    if not change.any() or not any((getattr(reach, name) * soon).any() for name in PANELS):
        return torch.zeros_like(change, dtype=torch.bool)
    return (change == 0) & may_reach(reach, panel) & soon & valid.T[:, :, None] & valid


def agent_with_most_leaks(reach: Reach) -> int:
    """Return the agent with most leaks, then most missing changes, then most episode starts."""

    def count(cells: Cells) -> list[int]:
        return torch.stack([cells(reach, panel) for panel in PANELS]).sum((0, 1, 3)).tolist()

    leaked, lost, starts = count(leaks), count(missing), reach.clears.sum(-1).tolist()
    return max(range(len(starts)), key=lambda agent: (leaked[agent], lost[agent], starts[agent]))


def reach_picture(reach: Reach, agent: int | None = None) -> Figure:
    """Draw one agent's reach of information in rollout and replay, and of gradients; LEGEND explains it."""
    agent = agent_with_most_leaks(reach) if agent is None else agent
    figure = Figure(figsize=(12, 4.9), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    norm = size_scale([getattr(reach, panel)[:, agent] for panel in PANELS])
    for ax, panel in zip(axes, PANELS, strict=True):
        _draw(ax, reach, agent, panel, norm)
    axes[0].set_ylabel("observation changed at step …")
    bar = figure.colorbar(ScalarMappable(norm, CHANGED), ax=list(axes), pad=0.01, fraction=0.03, extend="min")
    bar.set_label("size of the change")
    title = f"Agent {agent} · each row changes the observation of one step; colour shows which outputs change"
    figure.suptitle(title, fontsize=12)
    marks = _legend(reach, agent)
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9)
    return figure


def reach_png(reach: Reach, agent: int | None = None, dpi: int = 100) -> bytes:
    """Return the plot as PNG bytes."""
    buffer = BytesIO()
    reach_picture(reach, agent).savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def _draw(ax: Axes, reach: Reach, agent: int, panel: str, norm: LogNorm) -> None:
    change = getattr(reach, panel)[:, agent].double().numpy()
    allowed, leaked, lost = (cells(reach, panel)[:, agent].numpy() for cells in (may_reach, leaks, missing))
    invalid, steps = (~reach.valid)[agent].numpy(), len(change)
    colours = _colours(change, leaked, norm)
    all_valid = replace(reach, valid=torch.ones_like(reach.valid))
    in_episode = may_reach(all_valid, panel)[:, agent].numpy()
    colours[in_episode & (change == 0) & (invalid[:, None] | invalid)] = to_rgba(INVALID)
    ax.imshow(colours, interpolation="nearest", zorder=1)
    for edge in range(reach.horizon, steps, reach.horizon):
        for line in (ax.axvline, ax.axhline):
            line(edge - 0.5, color=EDGE, linestyle=(0, (2, 2)), linewidth=0.8, zorder=2)
    ax.add_collection(outline(allowed, ALLOWED, 1.1), autolim=False)
    ax.add_collection(outline(lost, MISSING, 1.8), autolim=False)
    ax.add_collection(outline(leaked, WRONG, 1.8), autolim=False)
    starts = reach.clears[agent].nonzero().flatten().numpy()
    ax.plot(starts, np.full(len(starts), -1.3), "v", color=ALLOWED, markersize=5, clip_on=False, zorder=4)
    ax.set(xlim=(-0.5, steps - 0.5), ylim=(steps - 0.5, -0.5), xlabel="… changes outputs at step")
    ax.set_xticks(range(0, steps, reach.horizon))
    ax.set_yticks(range(0, steps, reach.horizon))
    text, colour = _panel_result(int(leaked.sum()), int(lost.sum()), bool((change == 0).all()))
    ax.set_title(f"{PANELS[panel]}\n{text}", color=colour, fontsize=10, pad=14)


def _panel_result(leaked: int, lost: int, empty: bool) -> tuple[str, str]:
    """Return a panel's result and its colour."""
    if empty:
        return "no change at all, or not measured", MISSING
    counts = [f"{leaked} not allowed"] * bool(leaked) + [f"{lost} missing"] * bool(lost)
    if not counts:
        return "✓ changes where they must be, nowhere else", ALLOWED
    return f"✗ {', '.join(counts)}", WRONG if leaked else MISSING


def size_scale(panels: list[Float[Tensor, "N N"]]) -> LogNorm:
    """Scale colours from the smallest positive number to the largest."""
    sizes = torch.cat([panel.double().flatten() for panel in panels])
    sizes = sizes[sizes.isfinite() & (sizes > 0)]
    if not len(sizes):
        return LogNorm(1e-3, 1.0, clip=True)
    # matplotlib treats smaller numbers as zero.
    largest = max(float(sizes.max()), 1e-100)
    smallest = max(float(sizes.min()), largest * SPAN)
    # Powers of ten, so that the scale never shrinks to one number.
    return LogNorm(10 ** np.floor(np.log10(smallest)), 10 ** np.ceil(np.log10(largest) + 1e-9), clip=True)


def _colours(change: np.ndarray, leaked: np.ndarray, norm: LogNorm) -> np.ndarray:
    """Colour changes by size, leaks in red, zeros white, and numbers that are not finite magenta."""
    finite = np.isfinite(change)
    depth = norm(np.where(finite & (change > 0), change, 1.0))
    colours = np.where(leaked[..., None], LEAKED(depth), CHANGED(depth))
    colours[change == 0] = 1.0
    colours[~finite] = to_rgba(NOT_FINITE)
    return colours


def outline(cells: np.ndarray, colour: str, width: float) -> LineCollection:
    """Draw the border of a set of cells."""
    lines, padded = [], np.pad(cells, 1)
    for row, column in np.argwhere(cells):
        for down, right in ((-1, 0), (1, 0), (0, -1), (0, 1)):
            if not padded[1 + row + down, 1 + column + right]:
                middle = np.array([column + right / 2, row + down / 2])
                along = np.array([abs(down), abs(right)]) / 2
                lines.append([middle - along, middle + along])
    return LineCollection(lines, colors=colour, linewidths=width, capstyle="projecting", zorder=3)


def _legend(reach: Reach, agent: int) -> list[Line2D | Patch]:
    """Return the legend; rare marks only if they occur."""

    def occurs(cells: Cells) -> bool:
        return any(bool(cells(reach, panel)[:, agent].any()) for panel in PANELS)

    marks: list[Line2D | Patch] = [
        Patch(facecolor="white", edgecolor=EDGE, label="no change: exactly 0"),
        Patch(facecolor=CHANGED(0.6), edgecolor=ALLOWED, label="change; allowed inside the line"),
    ]
    if occurs(leaks):
        marks.append(Patch(facecolor=LEAKED(0.4), edgecolor=WRONG, linewidth=1.8, label="not allowed"))
    if occurs(missing):
        marks.append(Patch(facecolor="white", edgecolor=MISSING, linewidth=1.8, label="missing"))
    if occurs(lambda reach, panel: ~getattr(reach, panel).isfinite()):
        marks.append(Patch(facecolor=NOT_FINITE, label="not finite"))
    if not reach.valid[agent].all():
        marks.append(Patch(facecolor=INVALID, label="invalid step"))
    marks.append(Line2D([], [], color=EDGE, linestyle=(0, (2, 2)), label="segment edge"))
    marks.append(Line2D([], [], color=ALLOWED, marker="v", linestyle="", markersize=5, label="episode start"))
    return marks
