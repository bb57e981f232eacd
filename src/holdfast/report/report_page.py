"""The report of a training: one self-contained HTML page of one run or several side by side."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from holdfast.errors import ConfigError, error_text, writing
from holdfast.report import plots
from holdfast.report.learning_sections import did_it_learn, how_to_reproduce, what_was_run, where_time_goes
from holdfast.report.memory_sections import (
    gradient_reach,
    is_memory_fresh,
    is_memory_right,
    is_memory_used,
    state_of_one_agent,
)
from holdfast.report.policy_measurements import PolicyMeasurements, measure_run
from holdfast.report.run_data import RunData, read_run
from holdfast.report.section import Column, Figure, Report, Section
from holdfast.report.theme import as_png, colour_variables, drawing, plain
from holdfast.report.watch_section import watch_it
from holdfast.version import __version__

MAX_RUNS = 20
MAX_BYTES = 2_000_000
CURVE = "learning_curve.png"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data: blob:; media-src data: blob:">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="under">{under}</p>
{alarm}
<nav aria-label="Sections">{links}</nav>
{sections}
<footer>Written by holdfast {version}. This page needs no network; the data of its plots are in it.</footer>
</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""

SECTIONS: tuple[Callable[[Report], Section], ...] = (
    what_was_run,
    did_it_learn,
    is_memory_right,
    is_memory_used,
    is_memory_fresh,
    gradient_reach,
    where_time_goes,
    state_of_one_agent,
    watch_it,
    how_to_reproduce,
)
"""In the order of the page."""
Measure = Callable[[RunData], PolicyMeasurements]


def write_report(folders: Sequence[Path], target: Path, measure: Measure = measure_run) -> Path:
    """Write the report of one run, or of several side by side, to a file; return the file.

    `measure` returns what is measured on the policy of each run; by default its newest checkpoint is loaded.
    """
    if not 0 < len(folders) <= MAX_RUNS:
        raise ConfigError(f"A report shows 1 to {MAX_RUNS} runs, not {len(folders)}.")
    runs = [read_run(folder) for folder in folders]
    page = report_page(runs, [measure(run) for run in runs])
    _write(target, page.encode("utf-8", errors="replace"))
    for run in runs:
        _write_curve(run)
    return target


def report_page(runs: Sequence[RunData], measured: Sequence[PolicyMeasurements]) -> str:
    """Return the report as one self-contained HTML page."""
    report = Report(runs, measured)
    with drawing():
        sections = [_build(build, report) for build in SECTIONS]
    files, data = Path(__file__).parent / "page", dict[str, Any]()
    for section in sections:
        data |= {figure.name: _columns(figure.data) for figure in section.figures if figure.data}
    style = (files / "report.css").read_text()
    for mark in ("light", "dark"):
        style = style.replace(f"/*{mark}*/", colour_variables(dark=mark == "dark"))
    return PAGE.format(
        title=escape(report.title),
        under=escape(report.subtitle),
        alarm=_alarm(report),
        style=style,
        links="".join(f'<a href="#{section.name}">{escape(section.title)}</a>' for section in sections),
        sections="\n".join(map(_section, sections)),
        version=escape(__version__),
        data=_json(data),
        script=(files / "report.js").read_text(),
    )


def _build(build: Callable[[Report], Section], report: Report) -> Section:
    """Return a section; damaged files may break one, and the others are shown."""
    try:
        return build(report)
    except Exception as error:
        name = build.__name__
        reason = escape(plain(error_text(error, 300), 320))
        return Section(name, name.replace("_", " ").capitalize(), f"This section cannot be shown: {reason}")


def _section(section: Section) -> str:
    figures = "\n".join(map(_figure, section.figures))
    kind = f"plots {section.layout}".strip()
    body = f'<div class="{kind}">{figures}</div>' if figures else ""
    of_runs = f" <span>{escape(section.of)}</span>" if section.of else ""
    return (
        f'<section id="{section.name}"><h2>{escape(section.title)}{of_runs}</h2>\n<p class="lead">{section.lead}</p>\n'
        f"{body}{section.body}</section>"
    )


def _figure(figure: Figure) -> str:
    return (
        f'<figure data-name="{figure.name}"><div class="scroll">{figure.svg}</div>\n'
        f"<figcaption>{figure.caption}</figcaption></figure>"
    )


def _alarm(report: Report) -> str:
    if not report.faults:
        return ""
    items = "".join(f"<li>{escape(fault)}</li>" for fault in report.faults)
    folder = escape(str(report.faulty.folder))
    return (
        f'<div class="alarm" role="alert"><strong>Memory is not right.</strong>\n<ul>{items}</ul>\n'
        f"<code>holdfast check {folder}</code> names the cause.</div>"
    )


def _columns(data: Mapping[str, Column]) -> dict[str, list[Any]]:
    """Return columns for JSON, their numbers in six digits."""
    return {name: [_short(value) for value in column] for name, column in data.items()}


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value
    number = float(value)
    if not math.isfinite(number):
        return None
    return int(number) if number.is_integer() and abs(number) < 1e15 else float(f"{number:.6g}")


def _json(data: Any) -> str:
    """Return JSON that cannot end the script element it is in, nor start a comment there."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _write(file: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    part = file.with_name(f".{file.name}.part")
    with writing(file):
        part.write_bytes(content)
        os.replace(part, file)


def _write_curve(run: RunData) -> None:
    """Write the learning curve as a picture into the run's folder."""
    pictures = run.folder / "pictures"
    with writing(pictures):
        pictures.mkdir(exist_ok=True)
    _write(pictures / CURVE, as_png(plots.learning_curve(run)))
