"""The state that a call leaves on an object: what it changes among its attributes, and those of its parts."""

import random
from collections.abc import Iterator, MutableMapping, MutableSequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDictBase

from holdfast.cuda_graphs import CannotRecordError
from holdfast.types import Tensor

Tree = Any
"""A tensor, a TensorDict, or tuples and dataclasses of them."""


def tree_leaves(tree: Tree) -> list[Tensor]:
    """List the tensors of a tree."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, TensorDictBase):
        return [leaf for value in tree.values() for leaf in tree_leaves(value)]
    if isinstance(tree, tuple):
        return [leaf for value in tree for leaf in tree_leaves(value)]
    if is_dataclass(tree) and not isinstance(tree, type):
        return [leaf for field in fields(tree) for leaf in tree_leaves(getattr(tree, field.name))]
    return []


def clone_leaves(tree: Tree) -> Tree:
    """Copy a tree with its tensors."""
    if isinstance(tree, Tensor | TensorDictBase):
        return tree.clone()
    if isinstance(tree, np.ndarray):
        return tree.copy()
    if isinstance(tree, tuple):
        parts = [clone_leaves(value) for value in tree]
        return tuple(parts) if type(tree) is tuple else type(tree)(*parts)
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{field.name: clone_leaves(getattr(tree, field.name)) for field in fields(tree)})
    return tree


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors of one shape have the same numbers in memory."""
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def require_like(target: Tree, source: Tree, name: str) -> None:
    """Raise if the tensors of two trees differ in shape or dtype."""
    if _layout(target) != _layout(source):
        raise CannotRecordError(f"{name} has tensors of other shapes or dtypes in every step")


def copy_leaves(target: Tree, source: Tree, name: str = "it") -> None:
    """Copy the tensors of a tree into those of another of the same shapes."""
    require_like(target, source, name)
    into, new = tree_leaves(target), tree_leaves(source)
    pairs = [(old, leaf) for old, leaf in zip(into, new, strict=True) if not is_same_memory(old, leaf)]
    # A new value may be a view of an old one, which the first copy would overwrite.
    storages = {old.untyped_storage().data_ptr() for old, _ in pairs}
    pairs = [(old, leaf.clone() if leaf.untyped_storage().data_ptr() in storages else leaf) for old, leaf in pairs]
    for old, leaf in pairs:
        old.copy_(leaf)


class Place(NamedTuple):
    """Where an object holds a value."""

    name: str
    container: Any
    """A dictionary, that of an object's attributes too, or a list."""
    key: Any

    def get(self) -> Any:
        """Return the value."""
        return self.container[self.key]

    def set(self, value: Any) -> None:
        """Replace the value, if it is another: what is not changed may be read-only."""
        if not self.is_there() or self.get() is not value:
            self.container[self.key] = value

    def is_there(self) -> bool:
        """Return whether there is a value."""
        if isinstance(self.container, MutableSequence):
            return self.key < len(self.container)
        return self.key in self.container.keys()  # noqa: SIM118


LIMIT = 10_000
"""Places looked at in one object."""
OPAQUE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType, torch.nn.Module, torch.Generator)
"""What is not part of an object's state: weights have their own places, and do not change in a step."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
"""Generators of random numbers that an object may hold."""
HOST = (int, float, str, bytes, type(None), np.ndarray, np.generic)
"""Values on the host whose changes are seen."""


def places(root: object, name: str) -> tuple[list[Place], list[Place]]:
    """Find the values that an object holds, in its attributes, dictionaries and lists, and its parts that hold more."""
    if not type(root).__dictoffset__:
        raise CannotRecordError(f"{name} has __slots__, which are not looked at")
    values, parts = list[Place](), list[Place]()
    queue, visited, count = [(name, root)], set[int](), 0
    while queue:
        path, value = queue.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        container: Any
        if isinstance(value, MutableMapping):
            items, container = [(f"{path}[{key!r}]", key) for key in value.keys()], value  # noqa: SIM118
        elif isinstance(value, MutableSequence):
            items, container = [(f"{path}[{index}]", index) for index in range(len(value))], value
        else:
            container = vars(value)
            items = [(f"{path}.{key}", key) for key in container]
        for part, key in items:
            count += 1
            if count > LIMIT:
                raise CannotRecordError(f"{name} holds more than {LIMIT:,} values")
            inner, place = container[key], Place(part, container, key)
            if isinstance(inner, GENERATORS):
                parts.append(place)
            elif _is_container(inner):
                parts.append(place)
                queue.append((part, inner))
            elif isinstance(inner, HOST) or tree_leaves(inner):
                values.append(place)
            elif type(inner).__dictoffset__ and not isinstance(inner, OPAQUE):
                parts.append(place)
                queue.append((part, inner))
    return values, parts


def _is_container(value: object) -> bool:
    """Return whether what a value holds can be replaced in it: a dataclass that is not frozen, too."""
    if isinstance(value, MutableMapping | MutableSequence):
        return True
    is_tree = is_dataclass(value) and not isinstance(value, type) and bool(type(value).__dictoffset__)
    return is_tree and not vars(type(value))["__dataclass_params__"].frozen


def module_settings(module: torch.nn.Module) -> list[Any]:
    """List what a module computes with beside the contents of its tensors: their places, and numbers of its parts."""
    weights = [(weight.data_ptr(), weight.requires_grad) for weight in module.parameters()]
    numbers = [x for part in module.modules() for x in vars(part).values() if type(x) in (bool, int, float, str)]
    return [weights, [tensor.data_ptr() for tensor in module.buffers()], numbers]


class ObjectState:
    """The state of an object that a call changes: tensors, and whole numbers that count on the host.

    While the call is recorded, each of them is in a fixed tensor, into which the end of the call copies its new value.
    """

    def __init__(self, root: object, name: str) -> None:
        self._root, self._name = root, name
        self._places, parts = places(root, name)
        self._parts = [(place, place.get()) for place in parts]
        self.generators = [part for _, part in self._parts if isinstance(part, GENERATORS)]
        """The generators of random numbers that the object holds."""
        for place in self._places:
            if any(leaf.is_inference() for leaf in tree_leaves(place.get())):
                raise CannotRecordError(f"{place.name} was made in torch.inference_mode")
        self._before = [(place, place.get(), clone_leaves(place.get())) for place in self._places]
        self._versions = [_versions(value) for _, value, _ in self._before]
        self._trees: list[tuple[Place, Tree]] = []
        self._counters: list[tuple[Place, Tensor]] = []
        self._unchanged: list[tuple[Place, Any, Any]] = []
        self._after: dict[str, Tree] = {}

    def find_changes(self, device: torch.device) -> None:
        """Find what the call has changed since this was made, put it back, and keep it in fixed tensors."""
        self._after = {place.name: clone_leaves(place.get()) for place in self._places if place.is_there()}
        now = {place.name for place in places(self._root, self._name)[0]}
        added = sorted(now ^ {place.name for place in self._places})
        replaced = [place.name for place, part in self._parts if not place.is_there() or place.get() is not part]
        current = [place.get() if place.is_there() else None for place in self._places]
        versions = [_versions(value) for _, value, _ in self._before]
        self._put_back(versions)
        if replaced:
            raise CannotRecordError(f"{replaced[0]} is replaced in a step; change what it holds instead")
        if added:
            raise CannotRecordError(f"{added[0]} appears or disappears in a step")
        changes = zip(self._before, current, self._versions, versions, strict=True)
        for (place, value, saved), new, version, new_version in changes:
            if isinstance(value, HOST):
                if _same(saved, new):
                    self._unchanged.append((place, value, saved))
                    continue
                if type(value) is not int or type(new) is not int:
                    raise CannotRecordError(f"{place.name} changes on the host in every step")
                self._counters.append((place, torch.tensor(value, device=device)))
            elif new is not value or new_version != version:
                if any(leaf.device.type != device.type for leaf in tree_leaves(value)):
                    raise CannotRecordError(f"{place.name} is not on the device")
                # What is written in place may be held by others, too.
                self._trees.append((place, value if new is value else saved))
            else:
                self._unchanged.append((place, value, None))
        self._before, self._versions = [], []
        for place, tree in self._trees:
            place.set(tree)

    def is_as_recorded(self) -> bool:
        """Return whether all that the call does not change is what it was, but for what tensors hold."""
        fixed = [*self._parts, *((place, value) for place, value, saved in self._unchanged if saved is None)]
        numbers = ((place, saved) for place, _, saved in self._unchanged if saved is not None)
        return (
            all(place.is_there() and place.get() is value for place, value in fixed)
            and all(place.is_there() and _same(saved, place.get()) for place, saved in numbers)
            and all(place.is_there() and _layout(place.get()) == _layout(tree) for place, tree in self._trees)
            and all(place.is_there() and type(place.get()) is int for place, _ in self._counters)
        )

    def _put_back(self, versions: list[list[int]]) -> None:
        for place, part in self._parts:
            place.set(part)
        for (place, value, saved), before, version in zip(self._before, self._versions, versions, strict=True):
            # Only what has changed: others may be read-only.
            if isinstance(value, np.ndarray):
                if not _same(saved, value):
                    np.copyto(value, saved)
            elif before != version:
                copy_leaves(value, saved)
            place.set(value)

    def expected(self) -> list[Tensor]:
        """List what the call had left in the fixed tensors."""
        trees = [leaf for place, _ in self._trees for leaf in tree_leaves(self._after[place.name])]
        counters = (torch.tensor(self._after[place.name], device=tensor.device) for place, tensor in self._counters)
        return [*trees, *counters]

    def leaves(self) -> list[Tensor]:
        """List the fixed tensors."""
        return [
            *(leaf for _, tree in self._trees for leaf in tree_leaves(tree)),
            *(tensor for _, tensor in self._counters),
        ]

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Context around the calls that are recorded: counters are tensors, and new values end in the fixed ones."""
        counts = [place.get() for place, _ in self._counters]
        for place, tensor in self._counters:
            place.set(tensor)
        try:
            yield
            fixed, new = [tree for _, tree in self._trees], [place.get() for place, _ in self._trees]
            for (place, tree), value in zip(self._trees, new, strict=True):
                require_like(tree, value, place.name)
            # In one call: a new value may be another's old one.
            copy_leaves(tuple(fixed), tuple(new))
            for place, tensor in self._counters:
                value = place.get()
                if not isinstance(value, Tensor):
                    raise CannotRecordError(f"{place.name} changes on the host in every step")
                if value is not tensor:
                    tensor.copy_(value)
        finally:
            for place, tree in self._trees:
                place.set(tree)
            for (place, _), number in zip(self._counters, counts, strict=True):
                place.set(number)

    def load(self) -> None:
        """Copy what the object holds now into the fixed tensors, before a replay."""
        for place, tree in self._trees:
            current = place.get()
            if current is not tree:
                copy_leaves(tree, current, place.name)
                place.set(tree)
        for place, tensor in self._counters:
            tensor.fill_(place.get())

    def store_counters(self) -> None:
        """Write the counters back to the host, which waits for the device if there are any."""
        if self._counters:
            numbers = torch.stack([tensor for _, tensor in self._counters]).tolist()
            for (place, _), number in zip(self._counters, numbers, strict=True):
                place.set(number)


def _layout(tree: Tree) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(tree)]


def _versions(tree: Tree) -> list[int]:
    return [leaf._version for leaf in tree_leaves(tree)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        # By bytes: NaN is not equal to itself.
        is_like = isinstance(other, np.ndarray) and (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_like and one.tobytes() == other.tobytes()
    return type(one) is type(other) and (one == other or one != one)
