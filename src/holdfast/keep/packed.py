"""Trees of tensors, numbers and words as one file: safetensors, with the tree in its header."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from holdfast.errors import HoldfastError
from holdfast.shapes import Tensor

TENSOR, ARRAY, TUPLE, PAIRS = "$tensor", "$array", "$tuple", "$pairs"
TREE = "tree"
ZIPPED, PICKLED = b"PK\x03\x04", b"\x80"
"""How files of pickled objects begin: those that `torch.save` zips, and bare ones."""


class DamagedError(HoldfastError):
    """A file is not what was written, or not what could be read without executing it."""


def pack(tree: Any) -> bytes:
    """Write a tree of dicts, lists, tuples, tensors, arrays, numbers, words and None as bytes."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_written(tree, tensors))
    return save(_apart(tensors), {"format": "pt", TREE: structure})


def pack_weights(weights: Mapping[str, Tensor]) -> bytes:
    """Write weights by their names alone, as everybody's tools read them."""
    return save(_apart({name: _plain(weight) for name, weight in weights.items()}), {"format": "pt"})


def unpack(file: Path) -> Any:
    """Read a tree back; a file of anything else is refused."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return _read(json.loads(opened.metadata()[TREE]), tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError, IndexError) as error:
        raise DamagedError(f"{file} {_why(file, error)}") from error


def copied(tree: Any) -> Any:
    """Copy every tensor and array of a tree where it lies."""
    return _changed(tree, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf.copy())


def on_host(tree: Any) -> Any:
    """Bring every tensor of a tree to the host; those that are there stay as they are."""
    return _changed(tree, lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf)


def _changed(tree: Any, change: Callable[[Tensor | np.ndarray], Any]) -> Any:
    """Put something in the place of every tensor and array of a tree."""
    if isinstance(tree, Tensor | np.ndarray):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: _changed(part, change) for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_changed(part, change) for part in tree])
    return tree


def refuse_pickle(file: Path) -> None:
    """Say of a file of pickled objects what it is, whatever its name."""
    if not file.is_file():
        # To open a pipe is to wait for somebody who writes.
        raise DamagedError(f"{file} is no file")
    with file.open("rb") as opened:
        start = opened.read(9)
    # A length of a header may begin like a pickle; then the header itself follows.
    has_header = start[4:] == b"\0\0\0\0{"
    if start.startswith(ZIPPED) or (start.startswith(PICKLED) and not has_header):
        raise DamagedError(
            f"{file} is a pickle, which can execute anything when it is loaded; it is not loaded."
        )


def _why(file: Path, error: Exception) -> str:
    if isinstance(error, OSError) and not file.exists():
        return "is missing"
    told = " ".join(str(error).split())
    return f"cannot be read: {told or type(error).__name__}"


def _plain(tensor: Tensor) -> Tensor:
    """Lay a tensor on the host by itself: files hold no views."""
    with torch.no_grad():
        there = tensor.cpu().contiguous()
        shared = there.untyped_storage().nbytes() != there.numel() * there.element_size()
        return there.clone() if shared else there


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy what lies in the same place under a second name, such as weights that are tied."""
    found, places = dict[str, Tensor](), set[int]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in places else tensor
        places.add(place)
    return found


def _written(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor | np.ndarray):
        name = str(len(tensors))
        tensors[name] = _plain(tree if isinstance(tree, Tensor) else torch.from_numpy(np.array(tree)))
        return {TENSOR if isinstance(tree, Tensor) else ARRAY: name}
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: _written(part, tensors) for key, part in tree.items()}
        return {PAIRS: [[_written(key, tensors), _written(part, tensors)] for key, part in tree.items()]}
    if isinstance(tree, tuple):
        return {TUPLE: [_written(part, tensors) for part in tree]}
    if isinstance(tree, list):
        return [_written(part, tensors) for part in tree]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree.item() if isinstance(tree, np.generic) else tree
    if isinstance(tree, np.generic):
        return tree.item()
    raise TypeError(f"A {type(tree).__name__} cannot be saved; give tensors, arrays, numbers and words.")


def _read(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(structure, list):
        return [_read(part, tensors) for part in structure]
    if not isinstance(structure, dict):
        return structure
    if len(structure) == 1:
        ((mark, inside),) = structure.items()
        if mark == TENSOR:
            return tensors[inside]
        if mark == ARRAY:
            return tensors[inside].numpy()
        if mark == TUPLE:
            return tuple(_read(part, tensors) for part in inside)
        if mark == PAIRS:
            return {_read(key, tensors): _read(part, tensors) for key, part in inside}
    return {key: _read(part, tensors) for key, part in structure.items()}
