"""Component graphs: read from YAML, put in order, and refused with the graph and the place if wrong."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from holdfast.errors import ConfigError, HoldfastError, did_you_mean
from holdfast.policies.components import COMPONENTS, Component

OBS, CORE, ACTION, VALUE = "_obs_", "_core_", "_action_", "_value_"
REQUIRED = (OBS, CORE, ACTION, VALUE)
OURS = Path(__file__).parent.parent / "configs" / "agent"
THEIRS = Path("configs") / "agent"
HEAD = ("about", "components")
TAKEN = frozenset(dir(nn.ModuleDict()))


class GraphError(ConfigError):
    """A component graph is wrong; the message shows where."""


@dataclass(frozen=True)
class Entry:
    """One component as it stands in the file, right or wrong."""

    name: str
    kind: str
    sources: str
    line: int

    def __str__(self) -> str:
        """Write it as a line of the graph."""
        return f"{self.name:<16} {self.kind}{f'  reads {self.sources}' if self.sources else ''}"


@dataclass(frozen=True)
class Node:
    """One component that may be built."""

    name: str
    kind: type[Component]
    sources: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Graph:
    """Components by name, each after its sources."""

    where: str
    text: str
    entries: Sequence[Entry]
    nodes: Mapping[str, Node]

    def wrong(self, what: str, name: str | None = None) -> GraphError:
        """Say what is wrong, and show the graph with a mark at the place."""
        return _wrong(self.where, self.entries, what, [e.line for e in self.entries if e.name == name][-1:])


def _wrong(where: str, entries: Sequence[Entry], what: str, lines: Sequence[int]) -> GraphError:
    """Say what is wrong, and show the graph with a mark at each of some lines; the last one is the place."""
    place = [f", line {entry.line}, {entry.name}" for entry in entries if entry.line in lines[-1:]]
    shown = [f"{'>' if entry.line in lines else ' '} {entry}" for entry in entries]
    end = "" if what.endswith(("?", ".")) else "."
    return GraphError("\n".join([f"{where}{''.join(place)}: {what}{end}", *shown]))


def find_graph(name: str) -> Graph:
    """Find a graph by its name, in our package or in `configs/agent/` here, or by its file."""
    if name.endswith((".yaml", ".yml")):
        return read_graph(Path(name))
    ours, theirs = OURS / f"{name}.yaml", THEIRS / f"{name}.yaml"
    if ours.exists() and theirs.exists():
        raise ConfigError(
            f"agent={name} is one of Holdfast's graphs, and {theirs} has the same name; rename yours, or say "
            f"agent={theirs}."
        )
    if not ours.exists() and not theirs.exists():
        known = sorted({file.stem for folder in (OURS, THEIRS) for file in folder.glob("*.yaml")})
        meant = did_you_mean(name, known, f"there is {', '.join(known)}.")
        raise ConfigError(
            f"There is no component graph {name!r}; {meant} Your own goes by its file, NAME.yaml."
        )
    return read_graph(ours if ours.exists() else theirs)


def read_graph(file: Path) -> Graph:
    """Read a graph from a file."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    return parse_graph(text, file.name if file.parent == OURS else str(file))


def parse_graph(text: str, where: str = "the graph") -> Graph:
    """Read a graph from its text and put it in order."""
    entries, listed = _read(text, where)
    nodes = {entry.name: _node(entry, listed[entry.name], entries, where) for entry in entries}
    graph = Graph(where, text, entries, nodes)
    for name in REQUIRED:
        if name not in nodes:
            raise graph.wrong(f"there is no {name}; a graph has {', '.join(REQUIRED)}")
    for node in nodes.values():
        _check_sources(graph, node)
    try:
        order = list(TopologicalSorter({node.name: node.sources for node in nodes.values()}).static_order())
    except CycleError as error:
        cycle = error.args[1]
        raise graph.wrong(f"it reads itself: {' reads '.join(reversed(cycle))}", cycle[-1]) from None
    needed = _ancestors(nodes, (ACTION, VALUE))
    for name in nodes:
        if name not in needed:
            raise graph.wrong(f"nobody reads {name}: neither {ACTION} nor {VALUE} needs it", name)
    return Graph(where, text, entries, {name: nodes[name] for name in order})


def _ancestors(nodes: Mapping[str, Node], names: Collection[str]) -> set[str]:
    found, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += nodes[name].sources
    return found


def _check_sources(graph: Graph, node: Node) -> None:
    for source in node.sources:
        if source not in graph.nodes:
            meant = did_you_mean(source, graph.nodes, "name one of the components.")
            raise graph.wrong(f"its source {source} is not there; {meant}", node.name)
    if (node.kind.reads == "world") != (node.name == OBS):
        is_what = (
            "reads the world; only _obs_ does" if node.kind.reads == "world" else "does not read the world"
        )
        raise graph.wrong(f"{node.kind.__name__} {is_what}", node.name)
    if node.kind.reads != "sources" and node.sources:
        raise graph.wrong(f"{node.kind.__name__} reads no sources; {', '.join(node.sources)} came", node.name)
    if node.kind.reads == "sources" and not node.sources:
        raise graph.wrong("it reads nothing; name its sources", node.name)


def _node(entry: Entry, told: Any, entries: Sequence[Entry], where: str) -> Node:
    wrong = partial(_wrong, where, entries, lines=[entry.line])
    if not entry.name.isidentifier():
        raise wrong("a component's name is one word of letters, digits and _")
    if entry.name in TAKEN:
        raise wrong(f"the name {entry.name} is taken by PyTorch; choose another")
    if not isinstance(told, dict) or not isinstance(told.get("component"), str):
        raise wrong("say which component it is, for example component: Linear")
    options = {key: value for key, value in told.items() if key not in ("component", "sources")}
    sources = told.get("sources", [])
    sources = [sources] if isinstance(sources, str) else sources
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise wrong("sources is a list of names, for example sources: [_obs_]")
    try:
        kind = COMPONENTS.find(told["component"])
    except HoldfastError as error:
        raise wrong(str(error)) from None
    return Node(entry.name, kind, tuple(sources), options)


class _Loader(yaml.SafeLoader):
    """YAML without a silent last-one-wins: an option that comes twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            line = f"line {key.start_mark.line + 1}"
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                raise GraphError(
                    f"{line}: {key.value!r} is not a name; names are words, in quotes if need be."
                )
            if key.value in seen:
                raise GraphError(f"{line}: {key.value} is given twice.")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _read(text: str, where: str) -> tuple[list[Entry], dict[str, Any]]:
    """Read the components as the file has them, and what is said of each."""
    entries = _entries(_parsed(where, partial(yaml.compose, text, yaml.SafeLoader)))
    for entry in entries:
        lines = [each.line for each in entries if each.name == entry.name]
        if len(lines) > 1:
            raise _wrong(where, entries, f"there are two {entry.name}; a name is given once", lines)
    tree = _parsed(where, partial(yaml.load, text, _Loader))
    if not isinstance(tree, dict) or not isinstance(tree.get("components"), dict):
        raise GraphError(f"{where} has no components; write components: and below it a name for each.")
    for key in tree:
        if key not in HEAD:
            raise GraphError(f"{where} has {key!r} beside its components; it may have {' and '.join(HEAD)}.")
    return entries, tree["components"]


def _parsed(where: str, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except GraphError as error:
        raise GraphError(f"{where}, {error}") from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise GraphError(f"{where} is not YAML that can be read: {' '.join(str(error).split())}") from None


def _entries(root: yaml.Node | None) -> list[Entry]:
    """List what stands under `components`, line by line."""
    found = _value(root, "components")
    return [
        Entry(
            str(key.value),
            _words(_value(value, "component")),
            _words(_value(value, "sources")),
            key.start_mark.line + 1,
        )
        for key, value in (found.value if isinstance(found, yaml.MappingNode) else ())
    ]


def _value(node: yaml.Node | None, key: str) -> yaml.Node | None:
    """Look up what stands under a key."""
    if not isinstance(node, yaml.MappingNode):
        return None
    return next((value for name, value in node.value if name.value == key), None)


def _words(node: yaml.Node | None) -> str:
    """Write a name or a list of names as it stands there."""
    if isinstance(node, yaml.SequenceNode):
        return ", ".join(str(each.value) for each in node.value)
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
