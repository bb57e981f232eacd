"""Lists of wrappers in a config: `package.module:Class(argument=value) + package.module:Class`."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

from holdfast.config.base import parse_optional

# A quoted text is one token, so that the brackets and separators in it do not count.
_TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)


@dataclass(frozen=True)
class WrapperCall:
    """A wrapper's name, and its arguments besides the environment."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def split_wrappers(text: str) -> list[str]:
    """Split a list of wrappers at each `+` or `,` outside of brackets; none is the empty list."""
    return [] if parse_optional(text) is None else list(_split(text))


def _split(text: str) -> Iterator[str]:
    depth, item = 0, ""
    for token in _TOKEN.findall(text):
        depth += (token in "([{") - (token in ")]}")
        if token in "+," and not depth:
            yield item.strip()
            item = ""
        else:
            item += token
    yield item.strip()


def parse_wrapper(text: str) -> WrapperCall:
    """Parse one wrapper; its arguments are literals, and nothing is evaluated."""
    name, parenthesis, _ = text.partition("(")
    if not name.strip():
        raise ValueError("name a wrapper on both sides of each + or comma, as package.module:Class")
    if not parenthesis:
        return WrapperCall(text, (), {})
    try:
        call = ast.parse(f"wrapper{text[len(name) :]}", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{text} cannot be read: {error.msg}") from None
    except (MemoryError, RecursionError):
        raise ValueError(f"{name} has arguments that are nested too deeply") from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise ValueError(f"{text} cannot be read; write package.module:Class(argument=value)")
    if any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"{text} has **arguments; write argument=value")
    kwargs = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    return WrapperCall(name.strip(), tuple(map(_literal, call.args)), kwargs)


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{ast.unparse(node)} is no literal such as 4, 0.5, 'text', True, None or [1, 2]") from None


def parse_wrappers(value: Any) -> Any:
    """Split and check a list of wrappers."""
    items = split_wrappers(value) if isinstance(value, str) else value
    if isinstance(items, list | tuple):
        for item in items:
            if isinstance(item, str):
                parse_wrapper(item)
    return items


WrapperList = Annotated[tuple[str, ...], BeforeValidator(parse_wrappers)]
"""Wrappers with their arguments, separated by + or commas."""
