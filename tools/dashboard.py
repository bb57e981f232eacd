"""Draw docs/figures/dashboard.svg: the dashboard in the middle of a real run.

python tools/dashboard.py [RUN]     # a run folder; without one, `recall` is trained first
"""

import json
import re
import sys
import tempfile
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from holdfast import train
from holdfast.build import build_policy, build_world
from holdfast.config.run import Config
from holdfast.report.dashboard import Dashboard
from holdfast.report.text import title_of

PICTURE = Path(__file__).parent.parent / "docs" / "figures" / "dashboard.svg"
WIDTH = 120
STEPS = 150_000
PROGRESS = 0.8
"""The share of the run after which the picture is taken."""
NORMAL = [(18, 22, 27), (255, 99, 108), (95, 210, 131), (236, 190, 92)]
NORMAL += [(96, 156, 245), (206, 138, 238), (76, 196, 214), (222, 228, 235)]
BRIGHT = [(122, 134, 148), (255, 127, 134), (126, 226, 156), (246, 208, 120)]
BRIGHT += [(130, 178, 250), (220, 164, 246), (112, 216, 232), (255, 255, 255)]
THEME = TerminalTheme(NORMAL[0], NORMAL[7], NORMAL, BRIGHT)
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono"
VERTICAL_BAR = re.compile(r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)"[^>]*>│</text>')


def read_metrics(folder: Path) -> list[dict[str, int | float]]:
    """Read the metrics of a run, those of the machine included."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    machine_log = folder / "machine.jsonl"
    machine = [json.loads(line) for line in machine_log.read_text().splitlines()] if machine_log.exists() else []
    by_iteration = {line["iteration"]: line for line in machine}
    return [line | by_iteration.get(line["iteration"], {}) for line in lines]


def board_of(folder: Path) -> Dashboard:
    """Build the dashboard as it was at one iteration of the run, from its log files."""
    config = Config.model_validate_json((folder / "config.json").read_text())
    device = torch.device("cpu")
    world = build_world(config, device, agents=config.world.agents, seed=config.seed)
    title = title_of(config, folder.name, build_policy(config, world, device), device)
    board = Dashboard(config.iterations, title, config.trainer.bptt_horizon)
    for line in read_metrics(folder)[: max(1, int(PROGRESS * config.iterations))]:
        board.metrics |= line
        if "charts/episodic_return" in line:
            board.returns.add(line["charts/episodic_return"])
    board.elapsed = float(board.metrics["seconds"])
    return board


def draw(folder: Path) -> str:
    """Draw the dashboard as the text of an SVG file."""
    console = Console(file=StringIO(), record=True, force_terminal=True, width=WIDTH, emoji=False)
    console.print(board_of(folder))
    config = Config.model_validate_json((folder / "config.json").read_text())
    steps = config.trainer.total_timesteps
    command = f"holdfast train {config.world.name} run={folder.name} trainer.total_timesteps={steps}"
    svg = console.export_svg(title=command, theme=THEME, unique_id="dashboard", font_aspect_ratio=0.61)
    return without_web_fonts(svg)


def without_web_fonts(svg: str) -> str:
    """Use local fonts, so that the picture fetches nothing, and close the gaps in vertical lines."""
    while "@font-face" in svg:
        start = svg.index("@font-face")
        svg = svg[:start] + svg[svg.index("}", start) + 1 :].lstrip()
    return VERTICAL_BAR.sub(bar_as_rect, svg.replace("Fira Code", FONTS))


def bar_as_rect(match: re.Match[str]) -> str:
    """Draw a vertical bar as high as a row, which the glyph is not."""
    style, left, base = match.group(1), float(match.group(2)), float(match.group(3))
    return f'<rect class="{style}" x="{left + 5.3:.1f}" y="{base - 18.7:.1f}" width="1.6" height="24.8"/>'


def main() -> None:
    """Train if no run is given, and draw."""
    with tempfile.TemporaryDirectory() as runs:
        if len(sys.argv) > 1:
            folder = Path(sys.argv[1])
        else:
            keys = {"run": "mine", "runs_dir": runs, "trainer.total_timesteps": STEPS}
            folder = train("recall", keys).folder
        PICTURE.write_text(draw(folder), encoding="utf-8")
    print(f"drew {PICTURE}")


if __name__ == "__main__":
    main()
