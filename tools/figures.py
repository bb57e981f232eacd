"""Draw docs/figures: the reach picture of the README, and the diagrams, each for light and dark pages.

python tools/figures.py            # all of them; the reach picture takes a minute
python tools/figures.py diagrams   # without the reach picture
"""

import sys
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Theme:
    """The colours of a page."""

    ink: str
    muted: str
    line: str
    box: str
    blue: str
    blue_box: str
    red: str
    red_box: str
    green: str
    green_box: str
    amber: str
    amber_box: str


LIGHT = Theme(
    ink="#1f2328",
    muted="#59636e",
    line="#818b98",
    box="#f6f8fa",
    blue="#0969da",
    blue_box="#ddf0ff",
    red="#cf222e",
    red_box="#ffe4e1",
    green="#1a7f37",
    green_box="#dcf5e2",
    amber="#9a6700",
    amber_box="#fff3c9",
)
DARK = Theme(
    ink="#e6edf3",
    muted="#9198a1",
    line="#7a828c",
    box="#1c2128",
    blue="#58a6ff",
    blue_box="#132c4d",
    red="#ff7b72",
    red_box="#47201f",
    green="#56d364",
    green_box="#12341f",
    amber="#e3b341",
    amber_box="#3a2e0a",
)


@dataclass
class Drawing:
    """An SVG picture, drawn shape by shape."""

    width: int
    height: int
    theme: Theme
    title: str
    shapes: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 14,
        colour: str | None = None,
        anchor: str = "middle",
        weight: int = 400,
        mono: bool = False,
    ) -> None:
        """Write one line."""
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{colour or self.theme.ink}" '
            f'text-anchor="{anchor}" font-weight="{weight}" font-family="{MONO if mono else FONT}">'
            f"{escape(text)}</text>"
        )

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str,
        stroke: str | None = None,
        radius: float = 8,
        width: float = 1.5,
        dash: str = "",
    ) -> None:
        """Draw a box."""
        edge = f' stroke="{stroke}" stroke-width="{width:g}"' if stroke else ""
        edge += f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{radius:g}" fill="{fill}"{edge}/>'
        )

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        title: str,
        notes: tuple[str, ...] = (),
        fill: str | None = None,
        stroke: str | None = None,
    ) -> None:
        """Draw a box with a name, and notes below it."""
        self.rect(x, y, w, h, fill or self.theme.box, stroke or self.theme.line)
        top = y + h / 2 + 5 - 9 * len(notes)
        self.text(x + w / 2, top, title, 15, weight=600)
        for number, note in enumerate(notes, 1):
            self.text(x + w / 2, top + 18 * number, note, 12, self.theme.muted)

    def arrow(
        self, *points: tuple[float, float], colour: str | None = None, dash: str = "", width: float = 1.8
    ) -> None:
        """Draw an arrow along some points."""
        colour = colour or self.theme.line
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.shapes.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dashed} stroke-linejoin="round"/>'
        )
        (x0, y0), (x1, y1) = points[-2:]
        length = max(((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5, 1e-9)
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        back = [(x1 - 9 * ux + side * 4.5 * uy, y1 - 9 * uy - side * 4.5 * ux) for side in (1, -1)]
        corners = " ".join(f"{x:g},{y:g}" for x, y in [(x1 + ux, y1 + uy), *back])
        self.shapes.append(f'<polygon points="{corners}" fill="{colour}"/>')

    def svg(self) -> str:
        """Return the file's text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.shapes, "</svg>", ""])


def dataflow(theme: Theme) -> Drawing:
    """Draw the rollout above the update, and what goes from one to the other."""
    d = Drawing(960, 452, theme, "Data flow: rollout, stored segments with entry states, replay, PPO")
    d.rect(12, 14, 936, 196, "none", theme.line, 12, 1.2, "4 4")
    d.text(28, 38, "ROLLOUT", 12, theme.muted, "start", 700)
    d.text(932, 38, "one step of all agents", 12, theme.muted, "end")
    tops = [(30, "world", ("Step",)), (226, "encode", ("yours",))]
    tops += [
        (422, "memory", ("clear, then read",)),
        (618, "decode", ("yours",)),
        (814, "action", ("sampled",)),
    ]
    for x, name, notes in tops:
        yours = name in ("encode", "decode")
        fill, stroke = (theme.green_box, theme.green) if yours else (None, None)
        fill, stroke = (theme.blue_box, theme.blue) if name == "memory" else (fill, stroke)
        d.box(x, 62, 116, 64, name, notes, fill, stroke)
    labels = ("obs", "[A,D]", "[A,H]", "logits, value")
    for (x, *_), label in zip(tops, labels, strict=False):
        d.arrow((x + 118, 94), (x + 192, 94))
        d.text(x + 155, 84, label, 10.5, theme.muted)
    d.arrow((88, 128), (88, 154), (452, 154), (452, 129), colour=theme.red)
    d.text(270, 148, "first: an episode starts here, the state is cleared", 12, theme.red)
    d.arrow((508, 128), (508, 166), (480, 166), (480, 129), colour=theme.blue)
    d.text(518, 162, "state, carried from step to step, no gradient", 12, theme.blue, "start")
    d.arrow((872, 128), (872, 196), (60, 196), (60, 129))
    d.text(620, 190, "next step", 12, theme.muted)
    d.arrow((480, 212), (480, 240), colour=theme.ink)
    d.rect(176, 242, 608, 68, theme.amber_box, theme.amber)
    d.text(480, 270, "segments [B,T] + the entry state of each", 15, weight=600)
    d.text(
        480,
        292,
        "obs, action, log-prob, value, reward, first, valid; tail for bootstrapping",
        12,
        theme.muted,
    )
    d.rect(12, 334, 936, 104, "none", theme.line, 12, 1.2, "4 4")
    d.text(28, 358, "UPDATE", 12, theme.muted, "start", 700)
    d.arrow((480, 312), (480, 330), (220, 330), (220, 358), colour=theme.ink)
    d.box(110, 360, 220, 62, "replay", ("from the entry state, clears inside",), theme.blue_box, theme.blue)
    d.arrow((332, 391), (408, 391))
    d.text(370, 381, "log-probs", 11, theme.muted)
    d.box(410, 360, 180, 62, "PPO loss", ("first ratio = 1, checked",))
    d.arrow((592, 391), (668, 391))
    d.text(630, 381, "gradient", 11, theme.muted)
    d.box(670, 360, 160, 62, "optimizer", ("new weights",))
    d.arrow((832, 391), (914, 391), (914, 212), dash="5 4")
    return d


def lifecycle(theme: Theme) -> Drawing:
    """Draw the state of one agent over two segments with an episode start inside."""
    d = Drawing(960, 372, theme, "The state of one agent: carried, cleared, cut, stored, replayed")
    left, size, top = 92, 100, 96
    d.text(20, top + 26, "rollout", 14, anchor="start", weight=700)
    d.text(20, top + 206, "replay", 14, anchor="start", weight=700)
    names = ["t", "t+1", "t+2", "t+3", "t+4", "t+5", "t+6", "t+7"]
    for number, name in enumerate(names):
        x = left + number * size + (24 if number >= 4 else 0)
        start = number == 2
        for y in (top, top + 180):
            d.rect(x + 8, y, 64, 42, theme.blue_box, theme.blue)
            d.text(x + 40, y + 26, name, 13, mono=True)
        if start:
            for y in (top, top + 180):
                d.shapes.append(
                    f'<path d="M{x - 13:g} {y - 16:g} V{y + 58:g}" stroke="{theme.red}" stroke-width="2.2" '
                    'stroke-dasharray="5 3"/>'
                )
        if number < 7:
            gap = 24 if number == 3 else 0
            for y in (top, top + 180):
                if number == 3 and y != top:
                    continue
                if number == 1:
                    d.shapes.append(
                        f'<path d="M{x + 74:g} {y + 21:g} H{x + 84:g}" stroke="{theme.blue}" stroke-width="1.8"/>'
                    )
                    d.text(x + 97, y + 13, "0", 12, theme.red, weight=600)
                    d.arrow((x + 91, y + 21), (x + size + 5, y + 21), colour=theme.red)
                    continue
                d.arrow((x + 74, y + 21), (x + size + 5 + gap, y + 21), colour=theme.blue)
    clear = left + 2 * size - 13
    d.text(clear, top - 40, "first = True", 13, theme.red, weight=600)
    d.text(clear, top - 23, "clear, then read: nothing crosses", 12, theme.red)
    edge = left + 4 * size + 1
    d.shapes.append(f'<path d="M{edge:g} 22 V352" stroke="{theme.line}" stroke-width="1.4" stroke-dasharray="2 4"/>')
    d.text(edge - 10, 34, "segment 1", 12, theme.muted, "end")
    d.text(edge + 10, 34, "segment 2", 12, theme.muted, "start")
    d.text(edge + 12, top - 16, "values carried, gradient cut", 12, theme.blue, "start")
    for x, note in ((left + 8, "entry state 1"), (left + 4 * size + 32, "entry state 2")):
        d.arrow((x + 12, top + 46), (x + 12, top + 128), colour=theme.amber)
        d.rect(x - 22, top + 108, 104, 26, theme.amber_box, theme.amber, 6)
        d.text(x + 30, top + 126, note, 12)
        d.arrow((x + 12, top + 134), (x + 12, top + 178), colour=theme.amber)
    for x in (left + 230, left + 640):
        d.text(x, top + 126, "stored once per segment", 12, theme.amber)
    y = top + 240
    for x0, x1 in ((left + 2 * size + 8, left + 3 * size + 72), (left + 4 * size + 32, left + 7 * size + 96)):
        d.arrow((x1, y), (x0, y), colour=theme.green)
        d.text((x0 + x1) / 2, y + 20, "gradient", 12, theme.green)
    d.arrow((left + size + 72, y), (left + 8, y), colour=theme.green)
    d.text(left + size / 2 + 40, y + 20, "gradient", 12, theme.green)
    return d


def packed(theme: Theme) -> Drawing:
    """Draw one batch of three rows with resets inside, and the same rows packed for one dense call."""
    d = Drawing(960, 356, theme, "Three rows with episode starts inside, and the same rows packed with reset slots")
    cell, left = 52, 104
    fills = {"a": theme.blue_box, "b": theme.green_box, "c": theme.amber_box, "d": theme.box}
    edges = {"a": theme.blue, "b": theme.green, "c": theme.amber, "d": theme.line}
    rows = ["aaabbbbb", "aaaaaaaa", "aabbbccc"]

    def slot(x: float, y: float, kind: str, label: str) -> None:
        if kind == "R":
            d.rect(x + 2, y + 2, cell - 4, 36, theme.red_box, theme.red, 5)
            d.text(x + cell / 2, y + 25, "reset", 11.5, theme.red, weight=600)
        elif kind == "P":
            d.rect(x + 2, y + 2, cell - 4, 36, "none", theme.line, 5, 1.2, "3 3")
            d.text(x + cell / 2, y + 25, "pad", 11, theme.muted)
        else:
            d.rect(x + 2, y + 2, cell - 4, 36, fills[kind], edges[kind], 5)
            d.text(x + cell / 2, y + 25, label, 13, mono=True)

    d.text(20, 34, "stored [B,T]", 14, anchor="start", weight=700)
    d.text(left + 8 * cell + 18, 34, "first = True where the colour changes", 12.5, theme.muted, "start")
    for number, row in enumerate(rows):
        y = 48 + 44 * number
        d.text(left - 14, y + 25, f"row {number}", 12.5, theme.muted, "end")
        for t, kind in enumerate(row):
            slot(left + t * cell, y, kind, f"{t}")
    d.text(20, 214, "packed for one dense call", 14, anchor="start", weight=700)
    d.text(232, 214, "a reset slot before each start leaves a state of exactly 0", 12.5, theme.red, "start")
    for number, row in enumerate(rows):
        y, place = 228 + 40 * number, 0
        d.text(left - 14, y + 25, f"row {number}", 12.5, theme.muted, "end")
        for t, kind in enumerate(row):
            if t and row[t - 1] != kind:
                slot(left + place * cell, y, "R", "")
                place += 1
            slot(left + place * cell, y, kind, f"{t}")
            place += 1
        for rest in range(place, 10):
            slot(left + rest * cell, y, "P", "")
    x = left + 10 * cell + 26
    d.text(x, 252, "gates closed in a reset slot:", 12.5, theme.muted, "start")
    d.text(x, 272, "h = c = 0, forwards and backwards", 12.5, theme.muted, "start")
    d.text(x, 304, "outputs are read from the step slots", 12.5, theme.muted, "start")
    return d


def reach_comparison() -> bytes:
    """Draw the information reach of `fast` beside the same network that never clears its state."""
    from io import BytesIO

    import numpy as np
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    import holdfast
    from holdfast.check.adapters import adapt
    from holdfast.check.context import prepare
    from holdfast.report.check_page import CHANGED, LEAKED, agent_with_most_leaks, leaks

    class NeverClears(holdfast.Fast):
        """`fast` with the bug: the flags do not reach the memory."""

        def unroll(self, obs, first, state, valid=None):  # noqa: ANN001, ANN202
            return super().unroll(obs, torch.zeros_like(first), state, valid)

    world = holdfast.make_world("recall", agents=1)
    torch.manual_seed(0)
    wrong = prepare(adapt(NeverClears(world.spec), world)).reach()
    torch.manual_seed(0)
    right = prepare(adapt(holdfast.Fast(world.spec), world)).reach()
    agent = agent_with_most_leaks(wrong)
    figure = Figure(figsize=(10, 5.3), dpi=150, layout="constrained", facecolor="white")
    titles = ("state never cleared", "state cleared at every episode start")
    for ax, reach, title in zip(figure.subplots(1, 2, sharey=True), (wrong, right), titles, strict=True):
        change = reach.rollout[:, agent].double().numpy()
        leak = leaks(reach, "rollout")[:, agent].numpy()
        depth = np.log10(np.where(change > 0, change, 1.0))
        low = depth[change > 0].min()
        depth = (depth - low) / max(depth[change > 0].max() - low, 1e-9)
        picture = np.where(leak[..., None], LEAKED(0.25 + 0.6 * depth), CHANGED(depth))
        picture[change == 0] = 1.0
        ax.imshow(picture, interpolation="nearest")
        starts = reach.clears[agent].nonzero().flatten().tolist()
        for start in starts[1:] if starts and starts[0] == 0 else starts:
            ax.axvline(start - 0.5, color="#1a1a1a", linewidth=1)
        ax.plot(starts, [-1.2] * len(starts), "v", color="#1a1a1a", markersize=6, clip_on=False)
        ax.set(xlim=(-0.5, len(change) - 0.5), ylim=(len(change) - 0.5, -0.5))
        ax.set_xlabel("… changes outputs at these steps", fontsize=11)
        leaked = int(leak.sum())
        verdict = f"✗ clear: {leaked} leaks across episode starts" if leaked else "✓ clear: no information crosses"
        colour = "#d3001c" if leaked else "#1a7f37"
        ax.set_title(f"{title}\n", fontsize=12, pad=10)
        ax.text(0.5, 1.045, verdict, transform=ax.transAxes, ha="center", fontsize=11, color=colour)
    figure.axes[0].set_ylabel("observation changed at step …", fontsize=11)
    marks: list[Patch | Line2D] = [
        Patch(facecolor=CHANGED(0.6), label="information from the same episode"),
        Patch(facecolor=LEAKED(0.6), label="information from an earlier episode"),
        Line2D([], [], color="#1a1a1a", marker="v", linestyle="-", markersize=6, label="episode start"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, frameon=False, fontsize=10.5)
    paper = BytesIO()
    figure.savefig(paper, format="png")
    return paper.getvalue()


def main() -> None:
    """Write the diagrams, and the reach picture unless `diagrams` is given."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in {"dataflow": dataflow, "state_lifecycle": lifecycle, "packed_batch": packed}.items():
        for look, theme in {"light": LIGHT, "dark": DARK}.items():
            (FOLDER / f"{name}_{look}.svg").write_text(draw(theme).svg(), encoding="utf-8")
    if sys.argv[1:] != ["diagrams"]:
        (FOLDER / "reach.png").write_bytes(reach_comparison())
    print(f"drew {FOLDER}")


if __name__ == "__main__":
    main()
