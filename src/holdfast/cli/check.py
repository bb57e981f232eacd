"""`holdfast check`: prove or disprove a policy's memory, or the contract of a world."""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path

from rich.console import Console

from holdfast.check.conditions import Conditions
from holdfast.check.laws import examine
from holdfast.check.results import Laws
from holdfast.check.subject import Subject
from holdfast.check.world import WorldToCheck, examine_world
from holdfast.cli.keys import parse_words
from holdfast.cli.parser import Parser
from holdfast.cli.target import WORLD, find_target, find_world
from holdfast.errors import ConfigError
from holdfast.report.verdict import show


def run_check(words: Sequence[str]) -> int:
    """Measure the laws, print them, and return 0 if all hold."""
    asked = _parser().parse_intermixed_args(words)
    target, keys = _target_of(asked)
    if target.startswith(WORLD) and asked.html is not None:
        raise ConfigError(
            f"{target}: pages show what memory reaches, and a world has none; leave out --html."
        )
    page = None if asked.html is None else _page_for(target, asked.html)
    screen = Console(highlight=False, soft_wrap=True, emoji=False)
    with redirect_stdout(sys.stderr) if asked.json else nullcontext():
        # Whatever a policy prints, what is said on standard output is one JSON object.
        found = _found(target, keys, asked)
        laws = _measure(found, screen, Conditions(asked.device or "cpu", asked.precision, asked.kernel))
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


def _parser() -> Parser:
    parser = Parser(
        prog="holdfast check",
        usage="holdfast check TARGET [key=value ...] [options]",
        description="Measure the laws of memory on a policy, or those of a world.",
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="TARGET",
        help="a policy's name, component:NAME, a run's folder, package.module:Name of a class or policy, or "
        "world:NAME with its keys as in holdfast train: world:recall world.delay=4",
    )
    parser.add_argument("--policy", metavar="TARGET", help="another way to say it")
    parser.add_argument("--world", metavar="NAME", help="another way to say world:NAME")
    parser.add_argument("--obs", metavar="SHAPE", help="what a foreign policy sees: 4, or 3,84,84")
    parser.add_argument("--steps", type=int, metavar="N", help="how long to live in a world; else as needed")
    parser.add_argument(
        "--device", metavar="cpu|cuda", help="where to measure a policy of ours; else the CPU"
    )
    parser.add_argument(
        "--precision",
        metavar="float32|bfloat16",
        help="what its layers compute in; else what it computes in by itself",
    )
    parser.add_argument(
        "--kernel", metavar="auto|torch|triton", help="what runs its LSTM or GRU; else the one it has"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--html", nargs="?", const="", metavar="FILE", help="write a page with pictures too")
    return parser


def _target_of(asked: argparse.Namespace) -> tuple[str, dict[str, str]]:
    """Find the one thing to check, however it was said, and the keys that were given with it."""
    named = [asked.policy, asked.world and f"{WORLD}{asked.world.removeprefix(WORLD)}"]
    there = [each for each in named if each]
    rest = list(asked.words)
    if rest and ("=" not in rest[0] or not there):
        there = [rest.pop(0), *there]
    if len(there) > 1:
        raise ConfigError(f"Name one thing to check, not both {there[0]} and {there[1]}.")
    if not there:
        page = f"; {asked.html} was taken for the page's name, put it first" if asked.html else ""
        raise ConfigError(f"Name one thing to check, for example: holdfast check fast --html{page}.")
    more, keys = parse_words(rest)
    if more is not None:
        told = f"not both {there[0]} and {more}; see holdfast check --help."
        raise ConfigError(f"Name one thing to check, {told}")
    return there[0], keys


def _found(target: str, keys: dict[str, str], asked: argparse.Namespace) -> Subject | WorldToCheck:
    """Build what is to be checked; refuse what says nothing about it."""
    if not target.startswith(WORLD):
        if keys or asked.steps is not None:
            word = "--steps" if asked.steps is not None else next(iter(keys))
            raise ConfigError(
                f"{word} is for worlds, for example: holdfast check world:recall world.delay=4."
            )
        return find_target(target, asked.obs)
    for word in ("device", "precision", "kernel"):
        if getattr(asked, word) is not None:
            raise ConfigError(f"--{word} is for policies, for example: holdfast check fast --{word} ...")
    if asked.obs is not None:
        raise ConfigError(f"--obs is for foreign policies; what {target} shows is in its spec.")
    return find_world(target, keys, asked.steps)


def _page_for(target: str, file: str) -> Path:
    """Say where the page goes, before anybody waits for the measurements."""
    name = Path(target).resolve().name if Path(target).is_dir() else target
    page = Path(file or f"check-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.html")
    if page.is_dir() or not page.parent.is_dir():
        raise ConfigError(f"{page} cannot be written; name a file in a folder that exists: --html FILE.")
    return page


def _measure(subject: Subject | WorldToCheck, screen: Console, conditions: Conditions | None = None) -> Laws:
    """Measure law by law, and say which one it is meanwhile."""
    with screen.status("") as status:
        if isinstance(subject, WorldToCheck):
            return examine_world(subject, status.update)
        return examine(subject, status.update, conditions=conditions)
