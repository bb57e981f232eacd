"""Tensors that a policy and its state hold, and copies of policies that hold tensors with a graph."""

import copy
import gc
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from holdfast.types import Tensor

Copied = TypeVar("Copied")
LIBRARIES = ("torch", "numpy", "holdfast", "tensordict", "gymnasium", "builtins", "functools", "collections")
"""Packages whose globals are not the policy's."""


def tensors_held(*roots: Any) -> list[Tensor]:
    """List the tensors that objects hold: in attributes, classes, closures and globals of their own modules."""
    foreign = _foreign_parts(roots)
    visited, tensors, queue = set[int](), list[Tensor](), list(roots)
    while queue:
        obj = queue.pop()
        # By type: isinstance asks a proxy for the class of what it stands for, which may raise.
        if id(obj) in visited or id(obj) in foreign or issubclass(type(obj), ModuleType | FrameType):
            continue
        visited.add(id(obj))
        # Exact types: the fake tensors a compiler leaves behind have no storage.
        if type(obj) in (Tensor, nn.Parameter):
            tensors.append(obj)
        queue.extend(gc.get_referents(obj))
    return tensors


def _foreign_parts(roots: tuple[Any, ...]) -> set[int]:
    """Return the ids of the globals of modules that do not define the roots or their parts, and of all loaders."""
    own = {kind.__module__ for root in roots for kind in _classes(root)}
    own = {name for name in own if name.partition(".")[0] not in LIBRARIES}
    modules = [(name, vars(module)) for name, module in list(sys.modules.items()) if module is not None]
    # What loaded a module may know much else: pytest's loader knows all tests.
    loaders = {id(names.get(key)) for _, names in modules for key in ("__loader__", "__spec__")}
    return loaders | {id(names) for name, names in modules if name not in own}


def _classes(root: Any) -> Iterator[type]:
    module = getattr(root, "module", root)
    parts = [root, *(module.modules() if isinstance(module, nn.Module) else [])]
    for part in parts:
        yield from type(part).__mro__


def bytes_held(*roots: Any) -> tuple[int, int]:
    """Count the bytes of the tensors that objects hold, and the graph nodes these keep alive."""
    gc.collect()
    tensors = tensors_held(*roots)
    storages = {storage.data_ptr(): storage.nbytes() for leaf in tensors for storage in _storages(leaf)}
    nodes = [leaf.grad_fn for leaf in tensors if leaf.grad_fn is not None]
    visited: set[Any] = set()
    while nodes:
        node = nodes.pop()
        if node in visited:
            continue
        visited.add(node)
        nodes.extend(after for after, _ in node.next_functions if after is not None)
    return sum(storages.values()), len(visited)


def _storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """List the storages of a tensor: two of a sparse one, none of one that a transform or a compiler made."""
    parts = [tensor]
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    try:
        storages = [part.untyped_storage() for part in parts]
        return storages if all(storage.data_ptr() or not storage.nbytes() for storage in storages) else []
    except RuntimeError:
        return []


def copy_policy(policy: Copied) -> Copied:
    """Copy an object deeply; tensors with a graph, which cannot be copied, lose it."""
    try:
        return copy.deepcopy(policy)
    except RuntimeError as error:
        if "deepcopy protocol" not in str(error):
            raise
    with torch.no_grad():
        without_graph = {id(leaf): leaf.clone() for leaf in tensors_held(policy) if not leaf.is_leaf}
    return copy.deepcopy(policy, without_graph)
