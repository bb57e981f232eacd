"""Serialize trees of tensors, numbers and strings: safetensors files with the tree in the header."""

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from holdfast.errors import HoldfastError, one_line
from holdfast.types import Tensor

TENSOR, ARRAY, TUPLE, PAIRS = "$tensor", "$array", "$tuple", "$pairs"
TREE = "tree"
ZIPPED, PICKLED = b"PK\x03\x04", b"\x80"
"""First bytes of pickle files: those of `torch.save` (zip), and plain ones."""


class CorruptFileError(HoldfastError):
    """A file is missing, damaged, or a pickle, which is never loaded."""


def pack(tree: Any) -> bytes:
    """Serialize a tree of dicts, lists, tuples, tensors, arrays, numbers, strings and None."""
    tensors: dict[str, Tensor] = {}
    structure = json.dumps(_encode(tree, tensors))
    return save(tensors, {"format": "pt", TREE: structure})


def pack_weights(weights: Mapping[str, Tensor]) -> bytes:
    """Serialize weights by name, as any safetensors reader expects them."""
    return save({name: _standalone(weight) for name, weight in weights.items()}, {"format": "pt"})


def unpack(file: Path) -> Any:
    """Read a tree written by `pack`."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return _decode(json.loads(opened.metadata()[TREE]), tensors)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError, IndexError) as error:
        missing = isinstance(error, OSError) and not file.exists()
        reason = "is missing" if missing else f"cannot be read: {one_line(error)}"
        raise CorruptFileError(f"{file} {reason}") from error


@torch.no_grad()
def clone_tree(tree: Any) -> Any:
    """Copy every tensor and array of a tree, on its device; those on a GPU in one call for each dtype."""
    pairs = defaultdict[torch.dtype, list[tuple[Tensor, Tensor]]](list)

    def copy(leaf: Tensor | np.ndarray) -> Tensor | np.ndarray:
        if not isinstance(leaf, Tensor):
            return leaf.copy()
        if leaf.is_cpu:
            return leaf.clone()
        new = torch.empty_like(leaf)
        pairs[leaf.dtype].append((new, leaf))
        return new

    copied = _map_leaves(tree, copy)
    for each in pairs.values():
        new, old = zip(*each, strict=True)
        torch._foreach_copy_(list(new), list(old))  # pyright: ignore[reportPrivateImportUsage]
    return copied


def on_host(tree: Any) -> Any:
    """Copy every tensor of a tree to the CPU; tensors already there are not copied."""
    return _map_leaves(tree, lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf)


def _map_leaves(tree: Any, function: Callable[[Tensor | np.ndarray], Any]) -> Any:
    """Apply a function to every tensor and array of a tree."""
    if isinstance(tree, Tensor | np.ndarray):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: _map_leaves(value, function) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_map_leaves(value, function) for value in tree])
    return tree


def refuse_pickle(file: Path) -> None:
    """Raise for a pickle, whatever its file name, and for a missing file."""
    if not file.exists():
        raise CorruptFileError(f"{file} is missing")
    if not file.is_file():
        # Opening a named pipe would block.
        raise CorruptFileError(f"{file} is not a file")
    with file.open("rb") as opened:
        start = opened.read(9)
    # The length of a safetensors header may have the first byte of a pickle; then the header follows.
    has_header = start[4:] == b"\0\0\0\0{"
    if start.startswith(ZIPPED) or (start.startswith(PICKLED) and not has_header):
        raise CorruptFileError(f"{file} is a pickle, which can execute code when loaded; it is not loaded.")


@torch.no_grad()
def _standalone(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU, contiguous: safetensors holds neither views nor tied weights."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def _encode(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Tensor | np.ndarray):
        name = str(len(tensors))
        tensors[name] = _standalone(tree if isinstance(tree, Tensor) else torch.from_numpy(np.array(tree)))
        return {TENSOR if isinstance(tree, Tensor) else ARRAY: name}
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in tree):
            return {key: _encode(value, tensors) for key, value in tree.items()}
        return {PAIRS: [[_encode(key, tensors), _encode(value, tensors)] for key, value in tree.items()]}
    if isinstance(tree, tuple):
        return {TUPLE: [_encode(value, tensors) for value in tree]}
    if isinstance(tree, list):
        return [_encode(value, tensors) for value in tree]
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(f"A {type(tree).__name__} cannot be saved; use tensors, arrays, numbers and strings.")


def _decode(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(structure, list):
        return [_decode(value, tensors) for value in structure]
    if not isinstance(structure, dict):
        return structure
    if len(structure) == 1:
        ((mark, content),) = structure.items()
        if mark == TENSOR:
            return tensors[content]
        if mark == ARRAY:
            return tensors[content].numpy()
        if mark == TUPLE:
            return tuple(_decode(value, tensors) for value in content)
        if mark == PAIRS:
            return {_decode(key, tensors): _decode(value, tensors) for key, value in content}
    return {key: _decode(value, tensors) for key, value in structure.items()}
