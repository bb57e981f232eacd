"""What was saved must fit what is there now: each part is taken by name, its kind and shape looked at."""

from collections.abc import Mapping
from typing import Any, TypeVar

from holdfast.errors import ContractError
from holdfast.shapes import Tensor

T = TypeVar("T")


def taken(tree: Any, key: str | int, kind: type[T]) -> T:
    """Take one part of a saved tree; it must be of a kind. A truth is no number here."""
    if not isinstance(tree, Mapping) or key not in tree:
        raise ContractError(f"What was saved has no {key!r}.")
    found = tree[key]
    if not isinstance(found, kind) or (isinstance(found, bool) and kind is not bool):
        raise ContractError(f"What was saved as {key!r} is a {type(found).__name__}, not a {kind.__name__}.")
    return found


def tensor_like(tree: Any, key: str | int, like: Tensor) -> Tensor:
    """Take a copy of a saved tensor to where another one lies; both must have one shape and dtype."""
    found = taken(tree, key, Tensor)
    if found.shape != like.shape or found.dtype != like.dtype:
        raise ContractError(
            f"What was saved as {key!r} is {list(found.shape)} {found.dtype}; it must be "
            f"{list(like.shape)} {like.dtype}."
        )
    return found.to(like.device, copy=True)
