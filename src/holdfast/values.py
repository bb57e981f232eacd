"""How values are written: 1e6 and 5_000 are whole numbers, 4..24 is a range, none is nothing."""

import re
import shlex
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BeforeValidator, ValidationError

LONGEST_DELAY = 1_000_000


def whole_number(value: Any) -> Any:
    """Accept 1e6 and 5_000 as well as 1000000."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        raise ValueError("give a whole number such as 5000, 5_000 or 1e6") from None
    if not number.is_integer():
        raise ValueError("give a whole number")
    return int(value.replace("_", "")) if value.replace("_", "").lstrip("+-").isdigit() else int(number)


def number_or_range(value: Any) -> Any:
    """Accept 8 and 4..24."""
    if isinstance(value, str) and ".." in value:
        low, _, high = value.partition("..")
        return whole_number(low), whole_number(high)
    return whole_number(value)


def in_order(value: int | tuple[int, int]) -> int | tuple[int, int]:
    """Demand a delay that can be: not negative, not endless, the range the right way round."""
    low, high = (value, value) if isinstance(value, int) else value
    if not 0 <= low <= high <= LONGEST_DELAY:
        raise ValueError(f"give a number from 0 to {LONGEST_DELAY}, or a range such as 4..24")
    return value


def plain_name(value: str | None) -> str | None:
    """Demand a name that is one folder."""
    if value is not None and not re.fullmatch(r"\w[\w.+-]*", value):
        raise ValueError("a name is one word of letters, digits and . _ + -; runs_dir=DIR says where")
    return value


def optional(value: Any) -> Any:
    """Accept none and null for nothing."""
    return None if isinstance(value, str) and value.lower() in ("none", "null") else value


def how_often(value: Any) -> Any:
    """Accept first, off, and every:N."""
    if isinstance(value, str) and value in ("first", "off"):
        return value
    kind, _, number = str(value).partition(":")
    if kind != "every" or not number:
        raise ValueError("give first, off, or every:N such as every:10")
    count = whole_number(number)
    if count < 1:
        raise ValueError("every:N needs an N of at least 1")
    return f"every:{count}"


def due(when: str, iteration: int) -> bool:
    """Say whether something is to be done in an iteration, counted from 0: `first`, `every:N` or `off`.

    The first two iterations are looked at in any case: before the second, nothing was carried over.
    """
    if when == "off":
        return False
    return iteration < 2 or (when != "first" and iteration % int(when.partition(":")[2]) == 0)


def listed(value: Any) -> Any:
    """Accept a,b,c for several."""
    if isinstance(value, str):
        return [] if optional(value) is None else [word.strip() for word in value.split(",")]
    return value


class _Reader(yaml.SafeLoader):
    """YAML that knows 1e3 for a number."""


_Reader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+"), list("-+0123456789")
)


def plain(value: Any) -> Any:
    """Read a word as YAML does: numbers, switches, lists and mappings; none is nothing."""
    if not isinstance(value, str) or optional(value) is None:
        return optional(value)
    try:
        # A subclass of the safe loader.
        return yaml.load(value, Loader=_Reader)
    except yaml.YAMLError:
        raise ValueError("write it as YAML, for example 8, true, [1, 2] or '{size: 5}'") from None


def several_named(said: str, example: str) -> list[tuple[str, dict[str, str]]]:
    """Read `NAME key=value ... + NAME ...` as names with their keys."""
    found = []
    for part in said.split(" + "):
        try:
            words = shlex.split(part)
        except ValueError as error:
            raise ValueError(f"{part!r} cannot be read: {str(error).lower()}") from None
        if not words:
            raise ValueError(f"name something on both sides of each +, as in '{example}'")
        keys: dict[str, str] = {}
        for word in words[1:]:
            key, equals, given = word.partition("=")
            if not equals or not key or not given:
                raise ValueError(f"{word!r} is not key=value; write for example '{example}'")
            keys[key] = given
        found.append((words[0], keys))
    return found


def first_complaint(error: ValidationError, prefix: str = "") -> str:
    """Tell the first of pydantic's complaints in one line of ours."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if message.startswith(("world.", "trainer.")):
        # Said already, with its key, by a branch that is built on its own.
        return message
    message = message[0].lower() + message[1:]
    key = ".".join(str(part) for part in first["loc"] if not _is_branch_of_union(part))
    if not key:
        return message
    if first["type"] == "missing":
        return f"{prefix}{key} must be given."
    return f"{prefix}{key}={first['input']}: {message.rstrip('.')}."


def _is_branch_of_union(part: int | str) -> bool:
    if isinstance(part, int):
        return True
    return part in ("int", "float", "str") or part.startswith("tuple[")


Count = Annotated[int, BeforeValidator(whole_number)]
"""A whole number, however it is written."""

HowOften = Annotated[str, BeforeValidator(how_often)]
"""`first`, `off` or `every:N`."""

Span = Annotated[int | tuple[int, int], BeforeValidator(number_or_range), AfterValidator(in_order)]
"""A number of steps, or a range to draw it from."""

Names = Annotated[tuple[str, ...], BeforeValidator(listed)]
"""Several words, with commas between them."""

Numbers = Annotated[tuple[int, ...], BeforeValidator(listed)]
"""Several whole numbers, with commas between them."""
