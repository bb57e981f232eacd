"""Plots of states: which steps' outputs change with an observation, and the timeline of agents' states."""

from dataclasses import replace

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.figure import Figure

from holdfast.check.results import Reach
from holdfast.monitor.timeline import AgentTimeline, Timeline
from holdfast.report.check_page import agent_with_most_leaks, leaks, may_reach, missing, outline, size_scale
from holdfast.report.theme import BLUE, INK, ORANGE, PAPER, RED, SOFT, TEAL, TITLE, VIOLET, Plot, drawing, new_figure

TITLES = {
    "rollout": "by value, while it acts",
    "replay": "by value, in the update",
    "gradient": "by gradient",
}
"""Panels of a reach."""
FAINTEST, DEEPEST = 0.22, 1.0
"""Opacity of the smallest and the largest change: they read the same on light and dark paper."""
INVALID = 0.13


def reach(arrays: Reach, panel: str = "replay", agent: int | None = None) -> Figure:
    """Draw which outputs change with the observation of each step: the array that the laws assert on.

    `panel` is rollout, replay or gradient. Rows are outputs, columns the observations before them; red is not allowed.
    """
    agent = agent_to_show(arrays) if agent is None else agent
    with drawing():
        figure, axes = new_figure(5.0, 4.12 + 0.5 + TITLE, top=TITLE)
        _draw_cells(axes, arrays, panel, agent)
        steps = arrays.clears.shape[1]
        for edge in range(arrays.horizon, steps, arrays.horizon):
            for line in (axes.axvline, axes.axhline):
                line(edge - 0.5, color=TEAL, linestyle=(0, (3, 2)), linewidth=0.9)
        for start in arrays.clears[agent].nonzero().flatten().tolist():
            if start:
                for line in (axes.axvline, axes.axhline):
                    line(start - 0.5, color=RED, linewidth=1.3)
        axes.set(xlim=(-0.5, steps - 0.5), ylim=(steps - 0.5, -0.5), title=TITLES[panel])
        axes.set(xlabel="observation of step", ylabel="output of step")
        axes.set_xticks(range(0, steps, arrays.horizon))
        axes.set_yticks(range(0, steps, arrays.horizon))
        axes.grid(visible=False)
        axes.spines[:].set_visible(True)
        return figure


def agent_to_show(arrays: Reach) -> int:
    """Return the agent with most leaks; without any, one with long episodes and at least two starts."""
    if any(bool(leaks(arrays, panel).any()) for panel in TITLES):
        return agent_with_most_leaks(arrays)
    starts = arrays.clears.sum(-1).tolist()
    return min(range(len(starts)), key=lambda agent: (starts[agent] < 2, starts[agent]))


def _draw_cells(axes: Axes, arrays: Reach, panel: str, agent: int) -> None:
    """Colour the cells of one agent; where nothing changes the paper shows."""
    # Outputs downwards, as in the law: an output changes with the observations to the left of the diagonal.
    change = getattr(arrays, panel)[:, agent].double().numpy().T
    leaked, lost = (cells(arrays, panel)[:, agent].numpy().T for cells in (leaks, missing))
    size = size_scale([getattr(arrays, name)[:, agent] for name in ("rollout", "replay", "gradient")])
    colours = np.zeros((*change.shape, 4))
    colours[..., :3] = np.where(leaked[..., None], to_rgb(RED), to_rgb(BLUE))
    colours[..., 3] = np.where(change != 0, _opacity(change, size), 0.0)
    # A leak is never faint.
    colours[..., 3] = np.where(leaked, np.maximum(colours[..., 3], 0.75), colours[..., 3])
    invalid = (~arrays.valid)[agent].numpy()
    everywhere = replace(arrays, valid=torch.ones_like(arrays.valid))
    episode = may_reach(everywhere, panel)[:, agent].numpy().T
    colours[episode & (change == 0) & (invalid[:, None] | invalid)] = (*to_rgb(SOFT), INVALID)
    axes.imshow(colours, interpolation="nearest", zorder=2)
    if lost.any():
        axes.add_collection(outline(lost, ORANGE, 1.4), autolim=False)
    if leaked.any():
        axes.add_collection(outline(leaked, RED, 1.4), autolim=False)


def _opacity(change: np.ndarray, size: LogNorm) -> np.ndarray:
    finite = np.isfinite(change) & (change > 0)
    return FAINTEST + (DEEPEST - FAINTEST) * np.asarray(size(np.where(finite, change, 1.0)))


def state_timeline(timeline: Timeline) -> Figure:
    """Draw the size of a few agents' states, with episode starts, segment edges, the update and the drift after it."""
    steps = len(timeline.agents[0].norms)
    rows, strip = len(timeline.agents), bool(timeline.drift)
    with drawing():
        height = 0.95 + 0.36 * rows + 0.95 * strip
        figure = Plot(figsize=(10.2, height), dpi=100)
        top = 0.35 / height
        share = 0.36 * rows / height
        axes = figure.add_axes((0.075, 1 - top - share, 0.89, share))
        largest = max((max(agent.norms, default=0.0) for agent in timeline.agents), default=0.0) or 1.0
        for row, agent in enumerate(timeline.agents):
            _draw_agent(axes, agent, row, largest)
        axes.set(xlim=(-0.5, steps - 0.5), ylim=(rows - 0.5, -0.62))
        axes.set_yticks(range(rows), [f"agent {agent.agent}" for agent in timeline.agents])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        below = figure.add_axes((0.075, 0.5 / height, 0.89, 0.62 / height), sharex=axes) if strip else axes
        for each in dict.fromkeys((axes, below)):
            each.grid(visible=False)
            for edge in range(timeline.horizon, steps, timeline.horizon):
                if edge != timeline.update:
                    each.axvline(edge - 0.5, color=TEAL, linestyle=(0, (3, 2)), linewidth=1.0)
            if timeline.update is not None:
                each.axvline(timeline.update - 0.5, color=VIOLET, linewidth=2.0)
        axes.spines[:].set_visible(False)
        if strip and timeline.update is not None:
            axes.tick_params(axis="x", labelbottom=False, length=0)
            over = np.arange(timeline.update, timeline.update + len(timeline.drift))
            below.fill_between(over, timeline.drift, color=VIOLET, alpha=0.3, linewidth=0, step="mid")
            below.step(over, timeline.drift, color=VIOLET, linewidth=1.2, where="mid")
            below.set(ylim=(0, None), ylabel="drift")
        below.set_xlabel("step of each agent, from the start of the run")
        ticks = list(range(0, steps + 1, timeline.horizon))[:: max(1, steps // timeline.horizon // 8)]
        below.set_xticks([tick - 0.5 for tick in ticks], [f"{timeline.first_step + tick:,}" for tick in ticks])
        return figure


def _draw_agent(axes: Axes, agent: AgentTimeline, row: int, largest: float) -> None:
    """Draw one row: the opacity is the size of the state."""
    cells = np.zeros((1, max(1, len(agent.norms)), 4))
    cells[..., :3] = to_rgb(BLUE)
    cells[0, : len(agent.norms), 3] = np.array(agent.norms) / largest
    axes.imshow(
        cells,
        aspect="auto",
        interpolation="nearest",
        extent=(-0.5, len(agent.norms) - 0.5, row + 0.33, row - 0.33),
        zorder=2,
    )
    for kind, marker, face in (("terminated", "o", RED), ("truncated", "D", PAPER), ("start", "|", RED)):
        at = [step for step, how in agent.starts if how == kind]
        axes.vlines([step - 0.5 for step in at], row - 0.4, row + 0.4, color=RED, linewidth=1.1, zorder=3)
        style = {"color": RED, "markerfacecolor": face, "markersize": 4, "linestyle": "", "clip_on": False}
        axes.plot([step - 0.5 for step in at], [row - 0.42] * len(at), marker, zorder=4, **style)
