"""Which code of somebody's a config would import: read from its text, before anything is built."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from holdfast.errors import ConfigError
from holdfast.keep.checkpoint import CONFIG
from holdfast.keep.folder import GRAPH
from holdfast.mettagrid_knobs import METTAGRID
from holdfast.policies import COMPONENT
from holdfast.policies.graph import OURS
from holdfast.which_world import ENVPOOL, GYM, POPGYM


def refuse_named_code(folder: Path) -> None:
    """Refuse a folder whose config or graph names code: nothing of it is imported or built before."""
    found = code_named_in(folder)
    if found:
        raise ConfigError(
            f"{folder} names code that would be imported and run: {', '.join(found)}. "
            "If you trust whoever wrote it, pass trust_code=True."
        )


def code_named_in(folder: Path) -> list[str]:
    """List the names by which the config and the graph in a folder would import somebody's modules.

    It reads plain JSON and YAML: to read a `Config` is to import the class of a world already. In doubt a
    name is listed.
    """
    config, graph = _json(folder / CONFIG), folder / GRAPH
    found = [*_in_worlds(_part(config, "world")), *_in_worlds(_part(config, "trainer", "eval_worlds"))]
    found += _in_policy(_part(config, "policy", "name"), graph.exists())
    found += _with_colon(_part(config, "policy", "memory"))
    if graph.exists():
        found += _with_colon(_part(_yaml(graph), "components"))
    return list(dict.fromkeys(found))


def _in_worlds(tree: Any) -> Iterator[str]:
    """List names in the knobs of a world, with all its parts; ids that are registered are no code."""
    for key, value in _leaves(tree):
        ours = (GYM, POPGYM, ENVPOOL, METTAGRID)
        known = key == "name" and value.startswith(ours) and value.count(":") == 1
        # A wrapper is imported whatever its name looks like.
        if key == "wrappers" or (":" in value and not known):
            yield value


def _in_policy(name: Any, has_graph: bool) -> Iterator[str]:
    """List a policy that is a class, or a graph that is neither ours nor beside the config."""
    graphs = {f"{COMPONENT}{file.stem}" for file in OURS.glob("*.yaml")}
    for each in _with_colon(name):
        if not each.startswith(COMPONENT) or (each not in graphs and not has_graph):
            yield each


def _with_colon(tree: Any) -> list[str]:
    return [word for _, word in _leaves(tree) if ":" in word]


def _leaves(tree: Any) -> Iterator[tuple[str, str]]:
    """List every word in a tree with the key it stands under; what is there twice is seen once."""
    todo, seen = [("", tree)], set[int]()
    while todo:
        key, part = todo.pop(0)
        if isinstance(part, str):
            yield key, part
        elif id(part) not in seen and isinstance(part, dict | list):
            seen.add(id(part))
            todo += part.items() if isinstance(part, dict) else [(key, each) for each in part]


def _part(tree: Any, *keys: str) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _json(file: Path) -> Any:
    try:
        return json.loads(_text(file), object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON that can be read: {error}") from None


def _each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that comes twice: of two readers, each could take another one."""
    if len(dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} is given twice")
    return dict(pairs)


def _yaml(file: Path) -> Any:
    try:
        return yaml.safe_load(_text(file))
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(f"{file} is not YAML that can be read: {told}") from None


def _text(file: Path) -> str:
    if not file.is_file():
        raise ConfigError(f"{file} is no file.")
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from None
