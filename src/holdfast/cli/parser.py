"""Options of the verbs: a wrong one is told in one line, as everything else is."""

import argparse
from typing import NoReturn

from holdfast.errors import ConfigError
from holdfast.values import whole_number


class Parser(argparse.ArgumentParser):
    """Reads options; what is wrong is a ConfigError."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and where the options are told."""
        raise ConfigError(f"{message.rstrip('.')}; see {self.prog} --help.")


def count(text: str) -> int:
    """Read a whole number above 0, such as 2000, 5_000 or 1e6."""
    try:
        number = whole_number(text)
    except (ValueError, OverflowError):
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number above 0, such as 2000 or 1e6")
    return number
