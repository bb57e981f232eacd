"""`holdfast check`: prove or disprove a policy's memory."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from holdfast.check.laws import examine
from holdfast.check.results import Laws
from holdfast.check.subject import Subject
from holdfast.cli.target import find_target
from holdfast.errors import ConfigError
from holdfast.report.verdict import show


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see holdfast check --help.")


def run_check(words: Sequence[str]) -> int:
    """Measure the laws, print them, and return 0 if all hold."""
    parser = _Parser(prog="holdfast check", description="Measure the laws of memory on a policy, on the CPU.")
    parser.add_argument(
        "target",
        nargs="?",
        help="a policy's name, component:NAME, a run's folder, or package.module:Name of a class or policy",
    )
    parser.add_argument("--policy", metavar="TARGET", help="another way to say it")
    parser.add_argument("--obs", metavar="SHAPE", help="what a foreign policy sees: 4, or 3,84,84")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--html", nargs="?", const="", metavar="FILE", help="write a page with pictures too")
    asked = parser.parse_args(words)
    target = asked.target or asked.policy
    if asked.target and asked.policy:
        raise ConfigError(f"Name one thing to check, not both {asked.target} and {asked.policy}.")
    if not target:
        page = f"; {asked.html} was taken for the page's name, put it first" if asked.html else ""
        raise ConfigError(f"Name one thing to check, for example: holdfast check fast --html{page}.")
    page = None if asked.html is None else _page_for(target, asked.html)
    screen = Console(highlight=False, soft_wrap=True, emoji=False)
    with redirect_stdout(sys.stderr) if asked.json else nullcontext():
        # Whatever a policy prints, what is said on standard output is one JSON object.
        laws = _measure(find_target(target, asked.obs), screen)
    if asked.json:
        print(json.dumps(laws.as_json(), indent=2))
    else:
        show(screen, laws)
    if page is not None:
        # Pictures take a while to import.
        from holdfast.report.check_page import check_page

        page.write_text(check_page(laws, f"The memory of {target}"), encoding="utf-8")
        print(f"page {page}", file=sys.stderr if asked.json else sys.stdout)
    return 0 if laws.ok else 1


def _page_for(target: str, file: str) -> Path:
    """Say where the page goes, before anybody waits for the measurements."""
    name = Path(target).resolve().name if Path(target).is_dir() else target
    page = Path(file or f"check-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.html")
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigError(f"{page} cannot be written; name a file in a folder that exists: --html FILE.")
    return page


def _measure(subject: Subject, screen: Console) -> Laws:
    """Measure law by law, and say which one it is meanwhile."""
    with screen.status("") as status:
        return examine(subject, status.update)
