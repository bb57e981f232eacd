"""What was saved must fit what is there now: each part is taken by name, its kind and shape looked at."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from holdfast.errors import ContractError
from holdfast.shapes import Tensor

T = TypeVar("T")


def misfit(what: str) -> ContractError:
    """Say that something was saved of another run."""
    return ContractError(
        f"What was saved does not fit: {what}. Go on with what it was saved of, made with the same keys, or "
        "begin a new run."
    )


def taken(tree: Any, key: str | int, kind: type[T]) -> T:
    """Take one part of a saved tree; it must be of a kind. A truth is no number here."""
    if not isinstance(tree, Mapping):
        raise misfit(f"it is {type(tree).__name__}, must be a dict with {key!r}")
    if key not in tree:
        raise misfit(f"there is no {key!r}")
    found = tree[key]
    if not isinstance(found, kind) or (isinstance(found, bool) and kind in (int, float)):
        raise misfit(f"{key!r} is {type(found).__name__}, must be {kind.__name__}")
    return found


def tensor_like(tree: Any, key: str | int, like: Tensor) -> Tensor:
    """Take a copy of a saved tensor to where another one lies; both must have one shape and dtype."""
    found = taken(tree, key, Tensor)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise misfit(f"{key!r} is {list(found.shape)} {found.dtype}, must be {list(like.shape)} {like.dtype}")
    return found.to(like.device, copy=True)


def require_same(tree: Any, key: str, now: int | str) -> None:
    """Refuse what was saved of something made otherwise."""
    before = taken(tree, key, type(now))
    if before != now:
        raise misfit(f"it was saved with {key}={before}, and this has {key}={now}")


def up_to_date(text: str) -> str:
    """Read a config that was written before there were workers as it was meant: without any."""
    try:
        told = json.loads(text)
        if "async_factor" not in told["trainer"]:
            told["trainer"]["num_workers"] = 0
            told["world"] |= {"vector": "sync"} if told["world"].get("vector") == "async" else {}
        return json.dumps(told)
    except (ValueError, KeyError, TypeError, AttributeError):
        # What is wrong with it is told by who reads it as a config.
        return text
