"""Colours of the plots, light and dark, and figures as SVG that follows the page's colours."""

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, SOFT, GRID, PAPER = "#1b1f24", "#59636e", "#dde2e8", "#fffffe"
BLUE, ORANGE, GREEN, VIOLET, RED, TEAL = "#2166b0", "#c96a00", "#16793a", "#7a4fb5", "#c20d22", "#0f7f8a"
SERIES = (BLUE, ORANGE, GREEN, VIOLET, TEAL, "#a8336d", "#6b6f00", "#4a5a78")
DARK = {
    INK: "#e8ebef",
    SOFT: "#9aa4b0",
    GRID: "#343c46",
    PAPER: "#161b21",
    BLUE: "#6aaeea",
    ORANGE: "#f0a24a",
    GREEN: "#5fd283",
    VIOLET: "#b795ea",
    RED: "#ff7f86",
    TEAL: "#4fc3cd",
    SERIES[5]: "#e584b3",
    SERIES[6]: "#c5c94f",
    SERIES[7]: "#93a5c8",
}
"""Every colour of a plot, and the one that stands for it on dark paper."""

SIZE = (5.0, 2.9)
"""Inches of a plot: narrow, so that its text can be read on a phone."""
TITLE, LEGEND_ROW, LEGEND_WIDTH = 0.3, 0.2, 4.2
"""Inches of a title, of a row of a legend, and across a legend."""
STYLE: dict[Any, Any] = {
    # Names of runs are shown as they are: no formulas.
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "holdfast",
    "font.size": 10,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "axes.titlecolor": INK,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
}


@contextmanager
def drawing() -> Iterator[None]:
    """Draw in the style of the plots; names with signs that the font lacks are no warning."""
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        yield


class Plot(Figure):
    """A figure that a notebook shows although pyplot, and so its inline backend, is not imported."""

    def _repr_png_(self) -> bytes:
        return as_png(self, dpi=110)


def new_figure(
    width: float = SIZE[0], height: float = SIZE[1], *, left: float = 0.72, right: float = 0.16, top: float = 0.14
) -> tuple[Figure, Axes]:
    """Return a figure with one plot, whose labels fit into margins given in inches."""
    figure = Plot(figsize=(width, height), dpi=100)
    bottom = 0.5 / height
    axes = figure.add_axes((left / width, bottom, 1 - (left + right) / width, 1 - bottom - top / height))
    return figure, axes


def legend_above(figure: Figure, axes: Axes) -> None:
    """Add a legend above the plot, where it covers no curve; the figure grows by its rows."""
    labels = axes.get_legend_handles_labels()[1]
    columns = next(number for number in (4, 3, 2, 1) if number == 1 or _legend_width(labels, number) <= LEGEND_WIDTH)
    columns = min(columns, len(labels))
    (width, height), box = figure.get_size_inches(), axes.get_position()
    grown = height + LEGEND_ROW * -(-len(labels) // columns)
    figure.set_size_inches(width, grown)
    axes.set_position((box.x0, box.y0 * height / grown, box.width, box.height * height / grown))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.1}
    axes.legend(**place, ncols=columns, handlelength=1.6, columnspacing=1.3, labelspacing=0.25)


def _legend_width(labels: Sequence[str], columns: int) -> float:
    """Return about how many inches a legend takes."""
    longest = [max(map(len, column), default=0) for column in np.array_split(np.array(labels, object), columns)]
    return sum(0.46 + 0.07 * length for length in longest) - 0.16


def plain(text: str, limit: int = 60) -> str:
    """Return a name as it can be drawn: printable, on one line, not longer than the limit."""
    text = "".join(char if char.isprintable() else " " for char in text)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def as_png(figure: Figure, dpi: int = 150) -> bytes:
    """Return a figure as a picture on light paper."""
    buffer = BytesIO()
    with drawing():
        figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def as_svg(figure: Figure, name: str, alt: str) -> str:
    """Return a figure as an element of a page, in the colours of the page; `name` makes its identifiers unique."""
    buffer = BytesIO()
    with drawing(), matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Names of groups, such as figure_1, are those of every figure; nothing refers to them.
    text = re.sub(r'<g id="\w+">', "<g>", text)
    text = re.sub(r'id="(\w+)"', rf'id="{name}-\1"', text)
    text = re.sub(r'(href="|url\()#(\w+)', rf"\1#{name}-\2", text)
    text = re.sub(r"(font:[^;\"]*?)'[^\"]*?sans-serif", r"\1system-ui, sans-serif", text)
    for number, colour in enumerate(DARK):
        text = text.replace(colour, f"var(--plot{number})")
    width, height = figure.get_size_inches() * 72
    head = re.compile(r"<svg[^>]*>", re.DOTALL)
    return head.sub(
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'aria-label="{alt}" viewBox="0 0 {width:g} {height:g}" width="{width * 4 / 3:g}" height="{height * 4 / 3:g}">',
        text,
        count=1,
    )


def colour_variables(*, dark: bool) -> str:
    """Return the colours as CSS variables."""
    colours = DARK.values() if dark else DARK.keys()
    return " ".join(f"--plot{number}: {colour};" for number, colour in enumerate(colours))
