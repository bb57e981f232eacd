"""Component graphs: parsing YAML, checking, and sorting topologically."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from holdfast.config.base import SafeLoader
from holdfast.errors import ConfigError, HoldfastError, did_you_mean, one_line
from holdfast.policies.components import COMPONENTS, Component

OBS, CORE, ACTION, VALUE = "_obs_", "_core_", "_action_", "_value_"
REQUIRED = (OBS, CORE, ACTION, VALUE)
BUILTIN = Path(__file__).parents[2] / "configs" / "agent"
LOCAL = Path("configs") / "agent"
TOP_LEVEL = ("about", "components")
RESERVED = frozenset(dir(nn.ModuleDict()))


class GraphError(ConfigError):
    """An invalid component graph; the message shows where."""


@dataclass(frozen=True)
class Entry:
    """One component as written in the file, before any check."""

    name: str
    kind: str
    sources: str
    line: int

    def __str__(self) -> str:
        """Format as a line of the graph."""
        return f"{self.name:<16} {self.kind}{f'  reads {self.sources}' if self.sources else ''}"


@dataclass(frozen=True)
class Node:
    """One checked component."""

    name: str
    kind: type[Component]
    sources: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Graph:
    """Components by name, in topological order."""

    where: str
    text: str
    entries: Sequence[Entry]
    nodes: Mapping[str, Node]

    def error(self, what: str, name: str | None = None) -> GraphError:
        """Make an error that shows the graph with a mark at a component."""
        return _error(self.where, self.entries, what, [e.line for e in self.entries if e.name == name][-1:])


def _error(where: str, entries: Sequence[Entry], what: str, lines: Sequence[int]) -> GraphError:
    """Make an error that shows the graph with marks at `lines`; it is located at the last of them."""
    place = [f", line {entry.line}, {entry.name}" for entry in entries if entry.line in lines[-1:]]
    listing = [f"{'>' if entry.line in lines else ' '} {entry}" for entry in entries]
    end = "" if what.endswith(("?", ".")) else "."
    return GraphError("\n".join([f"{where}{''.join(place)}: {what}{end}", *listing]))


def find_graph(name: str) -> Graph:
    """Read a graph by name, from Holdfast's or the working directory's `configs/agent/`, or by its file."""
    if name.endswith((".yaml", ".yml")):
        return read_graph(Path(name))
    builtin, local = BUILTIN / f"{name}.yaml", LOCAL / f"{name}.yaml"
    if builtin.exists() and local.exists():
        raise ConfigError(
            f"agent={name} is one of Holdfast's graphs, and {local} has the same name; rename yours, or "
            f"write agent={local}."
        )
    if not builtin.exists() and not local.exists():
        names = sorted({file.stem for folder in (BUILTIN, LOCAL) for file in folder.glob("*.yaml")})
        hint = did_you_mean(name, names, f"choose from {', '.join(names)}.")
        raise ConfigError(
            f"There is no component graph {name!r}; {hint} For your own graph, write its file: NAME.yaml."
        )
    return read_graph(builtin if builtin.exists() else local)


def read_graph(file: Path) -> Graph:
    """Read a graph from a file."""
    if file.exists() and not file.is_file():
        # Reading a named pipe would block.
        raise ConfigError(f"{file} is not a regular file.")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return parse_graph(text, file.name if file.parent == BUILTIN else str(file))


def parse_graph(text: str, where: str = "the graph") -> Graph:
    """Parse a graph, check it, and sort it topologically."""
    entries, components = _read(text, where)
    nodes = {entry.name: _node(entry, components[entry.name], entries, where) for entry in entries}
    graph = Graph(where, text, entries, nodes)
    for name in REQUIRED:
        if name not in nodes:
            raise graph.error(f"there is no {name}; a graph has {', '.join(REQUIRED)}")
    for node in nodes.values():
        _check_sources(graph, node)
    try:
        order = list(TopologicalSorter({node.name: node.sources for node in nodes.values()}).static_order())
    except CycleError as error:
        cycle = error.args[1]
        raise graph.error(f"it reads itself: {' reads '.join(reversed(cycle))}", cycle[-1]) from None
    needed = {ACTION, VALUE}
    for name in reversed(order):
        needed.update(nodes[name].sources if name in needed else ())
    for name in nodes:
        if name not in needed:
            raise graph.error(f"{name} is not used: neither {ACTION} nor {VALUE} needs it", name)
    return Graph(where, text, entries, {name: nodes[name] for name in order})


def _check_sources(graph: Graph, node: Node) -> None:
    for source in node.sources:
        if source not in graph.nodes:
            hint = did_you_mean(source, graph.nodes, "name one of the components.")
            raise graph.error(f"its source {source} is not there; {hint}", node.name)
    kind, reads = node.kind.__name__, node.kind.reads
    if reads == "world" and node.name != OBS:
        raise graph.error(f"{kind} reads the world; only _obs_ does", node.name)
    if reads != "world" and node.name == OBS:
        raise graph.error(f"{kind} does not read the world", node.name)
    if reads != "sources" and node.sources:
        raise graph.error(f"{kind} reads no sources; {', '.join(node.sources)} came", node.name)
    if reads == "sources" and not node.sources:
        raise graph.error("it reads nothing; name its sources", node.name)


def _node(entry: Entry, config: Any, entries: Sequence[Entry], where: str) -> Node:
    error_at = partial(_error, where, entries, lines=[entry.line])
    if not entry.name.isidentifier():
        raise error_at("a component's name is one word of letters, digits and _")
    if entry.name in RESERVED:
        raise error_at(f"the name {entry.name} is taken by PyTorch; choose another")
    if not isinstance(config, dict) or not isinstance(config.get("component"), str):
        raise error_at("say which component it is, for example component: Linear")
    options = {key: value for key, value in config.items() if key not in ("component", "sources")}
    sources = config.get("sources", [])
    sources = [sources] if isinstance(sources, str) else sources
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise error_at("sources is a list of names, for example sources: [_obs_]")
    try:
        kind = COMPONENTS.find(config["component"])
    except HoldfastError as error:
        raise error_at(str(error)) from None
    return Node(entry.name, kind, tuple(sources), options)


class _Loader(SafeLoader):
    """A YAML loader that rejects duplicate keys, instead of keeping the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            line = f"line {key.start_mark.line + 1}"
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise GraphError(f"{line}: {key.value!r} is not a name; names are words, in quotes if need be.")
            if key.value in keys:
                raise GraphError(f"{line}: {key.value} is given twice.")
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def _read(text: str, where: str) -> tuple[list[Entry], dict[str, Any]]:
    """Return the components as written in the file, and the config of each."""
    entries = _entries(_parse_yaml(where, partial(yaml.compose, text, SafeLoader)))
    for name in dict.fromkeys(entry.name for entry in entries):
        lines = [entry.line for entry in entries if entry.name == name]
        if len(lines) > 1:
            raise _error(where, entries, f"there are two {name}; a name is given once", lines)
    tree = _parse_yaml(where, partial(yaml.load, text, _Loader))
    if not isinstance(tree, dict) or not isinstance(tree.get("components"), dict):
        raise GraphError(f"{where} has no components; write components: and below it a name for each.")
    for key in tree:
        if key not in TOP_LEVEL:
            raise GraphError(f"{where} has {key!r} beside its components; it may have {' and '.join(TOP_LEVEL)}.")
    return entries, tree["components"]


def _parse_yaml(where: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except GraphError as error:
        raise GraphError(f"{where}, {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise GraphError(f"{where} is not YAML that can be read: {one_line(error)}") from None


def _entries(root: yaml.Node | None) -> list[Entry]:
    """List the entries under `components`, line by line."""
    components = _value(root, "components")
    return [
        Entry(
            str(key.value), _text(_value(value, "component")), _text(_value(value, "sources")), key.start_mark.line + 1
        )
        for key, value in (components.value if isinstance(components, yaml.MappingNode) else ())
    ]


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Return the node under a key."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _text(node: yaml.Node | None) -> str:
    """Format a name or a list of names as written."""
    if isinstance(node, yaml.SequenceNode):
        return ", ".join(str(item.value) for item in node.value)
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
