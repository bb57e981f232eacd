"""Pictures of what reaches where: whatever is seen at a step, and every step at which it is felt."""

from collections.abc import Callable
from dataclasses import replace
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

from holdfast.check.flow import FELT_ACROSS
from holdfast.check.results import Reach
from holdfast.shapes import Bool, Float, Tensor

WRONG, MISSING, MAY, EDGE = "#d3001c", "#e08700", "#1a1a1a", "#9a9a9a"
ABSENT, NOT_A_NUMBER = "#e4e4e4", "#c000c0"
FELT = LinearSegmentedColormap.from_list("felt", ["#c3ddf2", "#5b9fd3", "#1f63a8", "#06204d"])
LEAKED = LinearSegmentedColormap.from_list("leaked", ["#ffc9c4", "#ff7f78", "#d3001c", "#5c000c"])
SPAN = 1e-9
"""Anything smaller than this share of the largest has the colour of the smallest."""

Cells = Callable[[Reach, str], Bool[Tensor, "N A N"]]
"""Picks cells of a panel."""

PANELS = {
    "lived": "information, lived",
    "replayed": "information, replayed",
    "gradient": "gradient, replayed",
}


def may_reach(reach: Reach, panel: str) -> Bool[Tensor, "N A N"]:
    """Say where something may be felt: now or later in the same episode, if somebody saw it.

    Gradients stay in their segment.
    """
    episode = reach.clears.cumsum(-1)
    steps = torch.arange(reach.clears.shape[-1])
    may = (episode.T[:, :, None] == episode[None]) & (steps[:, None] <= steps)[:, None]
    may &= reach.valid.T[:, :, None]
    if panel == "gradient":
        segment = steps // reach.horizon
        may &= (segment[:, None] == segment)[:, None]
    return may


def leaks(reach: Reach, panel: str) -> Bool[Tensor, "N A N"]:
    """Find what is felt and must not be, or is not even a number."""
    felt = getattr(reach, panel)
    return ((felt != 0) & ~may_reach(reach, panel)) | ~felt.isfinite()


def absences(reach: Reach) -> Bool[Tensor, "A N"]:
    """Find the steps at which nobody acts."""
    return ~reach.valid


def missing(reach: Reach, panel: str) -> Bool[Tensor, "N A N"]:
    """Find what is not felt soon after and must be, unless there is no memory or the panel is all empty."""
    felt, away = getattr(reach, panel), absences(reach)
    steps = torch.arange(felt.shape[0])
    later = steps - steps[:, None]
    soon = ((later > 0) & (later <= FELT_ACROSS))[:, None]
    if not felt.any() or not any((getattr(reach, each) * soon).any() for each in PANELS):
        return torch.zeros_like(felt, dtype=torch.bool)
    return (felt == 0) & may_reach(reach, panel) & soon & ~away.T[:, :, None] & ~away


def telling_agent(reach: Reach) -> int:
    """Pick the agent with most that must not be felt, then most that is missing, then most starts."""

    def count(cells: Cells) -> list[int]:
        return torch.stack([cells(reach, panel) for panel in PANELS]).sum((0, 1, 3)).tolist()

    wrong, lost, starts = count(leaks), count(missing), reach.clears.sum(-1).tolist()
    return max(range(len(starts)), key=lambda agent: (wrong[agent], lost[agent], starts[agent]))


def reach_picture(reach: Reach, agent: int | None = None) -> Figure:
    """Draw the information reach, lived and replayed, and the gradient reach of one agent side by side.

    A row is an experiment: what is seen at that step is changed, and colour shows at which steps it is felt.
    """
    agent = telling_agent(reach) if agent is None else agent
    figure = Figure(figsize=(12, 4.9), dpi=100, layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(PANELS), sharex=True, sharey=True)
    norm = _scale([getattr(reach, panel)[:, agent] for panel in PANELS])
    for ax, panel in zip(axes, PANELS, strict=True):
        _draw(ax, reach, agent, panel, norm)
    axes[0].set_ylabel("seen at step …")
    bar = figure.colorbar(ScalarMappable(norm, FELT), ax=list(axes), pad=0.01, fraction=0.03, extend="min")
    bar.set_label("how strongly it is felt")
    told = f"Agent {agent} · a row is what was seen at one step; colour shows at which steps it is felt"
    figure.suptitle(told, fontsize=12)
    marks = _legend(reach, agent)
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9)
    return figure


def reach_png(reach: Reach, agent: int | None = None, dpi: int = 100) -> bytes:
    """Draw a reach into the bytes of a PNG."""
    paper = BytesIO()
    reach_picture(reach, agent).savefig(paper, format="png", dpi=dpi)
    return paper.getvalue()


def _draw(ax: Axes, reach: Reach, agent: int, panel: str, norm: LogNorm) -> None:
    felt = getattr(reach, panel)[:, agent].double().numpy()
    may, wrong, lost = (cells(reach, panel)[:, agent].numpy() for cells in (may_reach, leaks, missing))
    away, steps = absences(reach)[agent].numpy(), len(felt)
    shown = _colours(felt, wrong, norm)
    everybody = replace(reach, valid=torch.ones_like(reach.valid))
    own = may_reach(everybody, panel)[:, agent].numpy()
    shown[own & (felt == 0) & (away[:, None] | away)] = to_rgba(ABSENT)
    ax.imshow(shown, interpolation="nearest", zorder=1)
    for edge in range(reach.horizon, steps, reach.horizon):
        for line in (ax.axvline, ax.axhline):
            line(edge - 0.5, color=EDGE, linestyle=(0, (2, 2)), linewidth=0.8, zorder=2)
    ax.add_collection(_outline(may, MAY, 1.1), autolim=False)
    ax.add_collection(_outline(lost, MISSING, 1.8), autolim=False)
    ax.add_collection(_outline(wrong, WRONG, 1.8), autolim=False)
    starts = reach.clears[agent].nonzero().flatten().numpy()
    ax.plot(starts, np.full(len(starts), -1.3), "v", color=MAY, markersize=5, clip_on=False, zorder=4)
    ax.set(xlim=(-0.5, steps - 0.5), ylim=(steps - 0.5, -0.5), xlabel="… is felt at step")
    ax.set_xticks(range(0, steps, reach.horizon))
    ax.set_yticks(range(0, steps, reach.horizon))
    told, colour = _verdict(int(wrong.sum()), int(lost.sum()), bool((felt == 0).all()))
    ax.set_title(f"{PANELS[panel]}\n{told}", color=colour, fontsize=10, pad=14)


def _verdict(wrong: int, lost: int, nothing: bool) -> tuple[str, str]:
    """Say what a panel shows, and in which colour."""
    if nothing:
        return "nothing at all, or not measured", MISSING
    told = [f"{wrong} must not be felt"] * bool(wrong) + [f"{lost} missing"] * bool(lost)
    if not told:
        return "✓ felt where it must be, nowhere else", MAY
    return f"✗ {', '.join(told)}", WRONG if wrong else MISSING


def _scale(panels: list[Float[Tensor, "N N"]]) -> LogNorm:
    """Scale colours from the smallest number above zero to the largest."""
    felt = torch.cat([panel.double().flatten() for panel in panels])
    felt = felt[felt.isfinite() & (felt > 0)]
    if not len(felt):
        return LogNorm(1e-3, 1.0, clip=True)
    # matplotlib takes what is smaller than this for nothing.
    largest = max(float(felt.max()), 1e-100)
    smallest = max(float(felt.min()), largest * SPAN)
    # Whole powers of ten, so that the scale is never a single number.
    return LogNorm(10 ** np.floor(np.log10(smallest)), 10 ** np.ceil(np.log10(largest) + 1e-9), clip=True)


def _colours(felt: np.ndarray, wrong: np.ndarray, norm: LogNorm) -> np.ndarray:
    """Colour numbers by their size, red where they must not be; zero is white, and no number stands out."""
    finite = np.isfinite(felt)
    depth = norm(np.where(finite & (felt > 0), felt, 1.0))
    shown = np.where(wrong[..., None], LEAKED(depth), FELT(depth))
    shown[felt == 0] = 1.0
    shown[~finite] = to_rgba(NOT_A_NUMBER)
    return shown


def _outline(cells: np.ndarray, colour: str, width: float) -> LineCollection:
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
    """Explain the marks; those of what is rare only if it is there."""

    def there(cells: Cells) -> bool:
        return any(bool(cells(reach, panel)[:, agent].any()) for panel in PANELS)

    shown: list[Line2D | Patch] = [
        Patch(facecolor="white", edgecolor=EDGE, label="not felt: exactly 0"),
        Patch(facecolor=FELT(0.6), edgecolor=MAY, label="felt; inside the line it may be"),
    ]
    if there(leaks):
        shown.append(
            Patch(facecolor=LEAKED(0.4), edgecolor=WRONG, linewidth=1.8, label="felt and must not be")
        )
    if there(missing):
        shown.append(Patch(facecolor="white", edgecolor=MISSING, linewidth=1.8, label="not felt and must be"))
    if there(lambda reach, panel: ~getattr(reach, panel).isfinite()):
        shown.append(Patch(facecolor=NOT_A_NUMBER, label="not a number"))
    if absences(reach)[agent].any():
        shown.append(Patch(facecolor=ABSENT, label="nobody acts"))
    shown.append(Line2D([], [], color=EDGE, linestyle=(0, (2, 2)), label="segment edge"))
    shown.append(Line2D([], [], color=MAY, marker="v", linestyle="", markersize=5, label="episode start"))
    return shown
