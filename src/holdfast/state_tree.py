"""Typed access to a saved state tree: every field is checked for its type, shape and dtype."""

from collections.abc import Mapping
from typing import Any, TypeVar

from holdfast.errors import ContractError
from holdfast.types import Tensor

T = TypeVar("T")


def mismatch(what: str) -> ContractError:
    """Return the error for a checkpoint that does not match this run."""
    return ContractError(
        f"Checkpoint does not match this run: {what}. Resume with the config it was saved with, or start a new run."
    )


def get_field(tree: Any, key: str | int, kind: type[T]) -> T:
    """Return `tree[key]`, checking its type (a bool is not an int)."""
    if not isinstance(tree, Mapping):
        raise mismatch(f"it is {type(tree).__name__}, must be a dict with {key!r}")
    if key not in tree:
        raise mismatch(f"there is no {key!r}")
    field = tree[key]
    if not isinstance(field, kind) or (isinstance(field, bool) and kind in (int, float)):
        raise mismatch(f"{key!r} is {type(field).__name__}, must be {kind.__name__}")
    return field


def get_tensor_like(tree: Any, key: str | int, like: Tensor) -> Tensor:
    """Return a copy of a saved tensor on the device of `like`; shape and dtype must be those of `like`."""
    tensor = get_field(tree, key, Tensor)
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise mismatch(f"{key!r} is {list(tensor.shape)} {tensor.dtype}, must be {list(like.shape)} {like.dtype}")
    return tensor.to(like.device, copy=True)


def require_equal(tree: Any, key: str, current: int | str) -> None:
    """Require that a saved value equals the current one."""
    saved = get_field(tree, key, type(current))
    if saved != current:
        raise mismatch(f"it was saved with {key}={saved}, and this has {key}={current}")
