"""Draw docs/dashboard.svg: the dashboard in the middle of a real run, for the README.

python tools/dashboard.py [RUN]     # a folder of a run; without one, `recall` is trained first
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
from holdfast.config import Config
from holdfast.report import title_of
from holdfast.report.dashboard import Dashboard

PICTURE = Path(__file__).parent.parent / "docs" / "dashboard.svg"
WIDTH = 120
STEPS = 150_000
WHERE = 0.8
"""At which part of the run the picture is taken."""
PLAIN = [(18, 22, 27), (255, 99, 108), (95, 210, 131), (236, 190, 92)]
PLAIN += [(96, 156, 245), (206, 138, 238), (76, 196, 214), (222, 228, 235)]
BRIGHT = [(122, 134, 148), (255, 127, 134), (126, 226, 156), (246, 208, 120)]
BRIGHT += [(130, 178, 250), (220, 164, 246), (112, 216, 232), (255, 255, 255)]
THEME = TerminalTheme(PLAIN[0], PLAIN[7], PLAIN, BRIGHT)
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono"
UPRIGHT = re.compile(r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)"[^>]*>│</text>')


def lines_of(folder: Path) -> list[dict[str, int | float]]:
    """Read what a run measured, the machine's numbers beside its own."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    apart = folder / "machine.jsonl"
    machine = [json.loads(line) for line in apart.read_text().splitlines()] if apart.exists() else []
    beside = {line["iteration"]: line for line in machine}
    return [line | beside.get(line["iteration"], {}) for line in lines]


def board_of(folder: Path) -> Dashboard:
    """Build the dashboard as it was at one moment of the run, from the numbers in its files."""
    config = Config.model_validate_json((folder / "config.json").read_text())
    device = torch.device("cpu")
    world = build_world(config, device, agents=config.world.agents, seed=config.seed)
    title = title_of(config, folder.name, build_policy(config, world, device), device)
    board = Dashboard(config.iterations, title, config.trainer.bptt_horizon)
    for line in lines_of(folder)[: max(1, int(WHERE * config.iterations))]:
        board.metrics |= line
        if "charts/episodic_return" in line:
            board.returns.add(line["charts/episodic_return"])
    board.elapsed = float(board.metrics["seconds"])
    return board


def draw(folder: Path) -> str:
    """Draw the dashboard as the text of an SVG file."""
    paper = Console(file=StringIO(), record=True, force_terminal=True, width=WIDTH, emoji=False)
    paper.print(board_of(folder))
    config = Config.model_validate_json((folder / "config.json").read_text())
    steps = config.trainer.total_timesteps
    command = f"holdfast train {config.world.name} run={folder.name} trainer.total_timesteps={steps}"
    return tidy(paper.export_svg(title=command, theme=THEME, unique_id="dashboard", font_aspect_ratio=0.61))


def tidy(svg: str) -> str:
    """Take the reader's own fonts, so that nothing is fetched, and close the gaps in upright lines."""
    while "@font-face" in svg:
        start = svg.index("@font-face")
        svg = svg[:start] + svg[svg.index("}", start) + 1 :].lstrip()
    return UPRIGHT.sub(upright, svg.replace("Fira Code", FONTS))


def upright(found: re.Match[str]) -> str:
    """Draw a line as high as a row, which a letter is not."""
    look, left, base = found.group(1), float(found.group(2)), float(found.group(3))
    return f'<rect class="{look}" x="{left + 5.3:.1f}" y="{base - 18.7:.1f}" width="1.6" height="24.8"/>'


def main() -> None:
    """Train if there is nothing to draw, and draw."""
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
