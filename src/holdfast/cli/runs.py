"""`holdfast runs`: list the runs of a folder."""

import json
import sys
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from holdfast.cli.arguments import Parser, one_of
from holdfast.errors import ConfigError
from holdfast.report.run_list import RunSummary, list_runs
from holdfast.report.text import short_number

COLUMNS = {
    "name": "name",
    "world": "world",
    "policy": "policy",
    "seed": "seed",
    "steps": "steps",
    "return": "episodic_return",
    "updated": "updated",
    "finished": "finished",
}
NUMBERS = ("seed", "steps", "return")
UNKNOWN = "?"
WIDTH = 160
"""Columns of a table that is not printed to a terminal."""


def run_runs(args: Sequence[str]) -> int:
    """List the runs of a folder."""
    options = _parser().parse_args(args)
    folder = Path(options.folder)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; give the folder of all runs, for example: holdfast runs runs.")
    runs = _sort(list(list_runs(folder)), options.sort, options.reverse)
    if options.json:
        print(json.dumps([run.as_json() for run in runs], indent=2))
        return 0
    out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
    if runs:
        out.print(_table(runs))
    else:
        out.print(f"{folder} holds no runs; holdfast train starts one.", soft_wrap=True)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast runs",
        usage="holdfast runs [FOLDER] [--sort COLUMN] [--reverse] [--json]",
        description="List the runs of a folder: world, policy, seed, steps, return, last change, finished or not.",
    )
    add = parser.add_argument
    add("folder", nargs="?", default="runs", metavar="FOLDER", help="folder of the runs (runs)")
    add("--sort", type=one_of(list(COLUMNS)), default="name", metavar="COLUMN", help=f"{', '.join(COLUMNS)} (name)")
    add("--reverse", action="store_true", help="largest, latest or last name first")
    add("--json", action="store_true", help="print a JSON list instead of the table")
    return parser


def _sort(runs: list[RunSummary], column: str, reverse: bool) -> list[RunSummary]:
    """Sort by a column; rows where it is unknown come last."""
    value = attrgetter(COLUMNS[column])
    complete = sorted((run for run in runs if value(run) is not None), key=value, reverse=reverse)
    return complete + [run for run in runs if value(run) is None]


def _table(runs: Sequence[RunSummary]) -> Table:
    columns = [Column(name, justify="right" if name in NUMBERS else "left", overflow="fold") for name in COLUMNS]
    table = Table(*columns, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for run in runs:
        table.add_row(*(Text(_cell(name, getattr(run, field))) for name, field in COLUMNS.items()))
    return table


def _cell(column: str, value: str | int | float | None) -> str:
    """Format one cell; control characters of a name are escaped."""
    if value is None:
        return UNKNOWN
    if column == "finished":
        return "yes" if value else "no"
    if column == "return":
        return short_number(float(value), digits=4)
    if isinstance(value, str):
        return "".join(character if character.isprintable() else repr(character)[1:-1] for character in value)
    return f"{value:,}" if column == "steps" else str(value)
