"""Parse key=value overrides and options."""

import argparse
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

from holdfast.config.base import parse_int
from holdfast.errors import ConfigError, did_you_mean

OPTIONS = ("--resume", "--trace", "--trust-code", "--ranks", "--gpus", "--max-restarts", "--help")
"""Options beside key=value."""


def parse_overrides(args: Sequence[str]) -> tuple[str | None, dict[str, str]]:
    """Split arguments into a recipe, if one is named, and overrides."""
    recipe, overrides = None, {}
    for arg in args:
        key, equals, value = arg.partition("=")
        key = key.lstrip("+")
        if arg.startswith("-"):
            near = get_close_matches(key, OPTIONS, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "write keys as key=value, see --help."
            raise ConfigError(f"There is no option {arg!r}; {hint}")
        if not equals and arg:
            if recipe is not None:
                raise ConfigError(f"{arg!r} is neither key=value nor the recipe, which is {recipe!r}.")
            recipe = arg
        elif not key or not value:
            raise ConfigError(f"{arg!r} is not key=value; write for example seed=1.")
        elif key in overrides:
            raise ConfigError(f"{key} is given twice, as {overrides[key]} and as {value}; keep one.")
        else:
            overrides[key] = value
    return recipe, overrides


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Raise a ConfigError that points to --help."""
        raise ConfigError(f"{message.rstrip('.')}; see {self.prog} --help.")


def count(text: str) -> int:
    """Parse a positive integer, such as 2000, 5_000 or 1e6."""
    try:
        number = parse_int(text)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give an integer above 0, such as 2000 or 1e6")
    return number


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Return a parser of one of several names; hyphens may stand for spaces."""

    def parse(word: str) -> str:
        name = word.replace("-", " ")
        if name not in choices:
            hint = did_you_mean(name, choices, f"choose from {', '.join(choices)}")
            raise argparse.ArgumentTypeError(f"{word}: {hint}")
        return name

    return parse


def add_trust_code(parser: argparse.ArgumentParser) -> None:
    """Add the option that trusts the author of a saved config."""
    text = "import all code that a saved config names, not only installed packages"
    parser.add_argument("--trust-code", action="store_const", const=True, help=text)


def output_file(name: str, option: str) -> Path:
    """Return a file to write later; raise now if it cannot be written."""
    file = Path(name)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written; name a file in a folder that exists: {option} FILE.")
    return file
