"""Component graphs: read from YAML, put in order, and refused with the graph and the place if wrong."""

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
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


class GraphError(ConfigError):
    """A component graph is wrong; the message shows where."""


@dataclass(frozen=True)
class Node:
    """One component as the file has it."""

    name: str
    kind: type[Component]
    sources: tuple[str, ...]
    options: Mapping[str, Any]
    line: int

    def __str__(self) -> str:
        """Write it as a line of the graph."""
        reads = f"  reads {', '.join(self.sources)}" if self.sources else ""
        return f"{self.name:<16} {self.kind.__name__}{reads}"


@dataclass(frozen=True)
class Graph:
    """Components by name, each after its sources."""

    where: str
    text: str
    nodes: Mapping[str, Node]

    def wrong(self, what: str, name: str | None = None) -> GraphError:
        """Say what is wrong, and show the graph with a mark at the place."""
        place = self.nodes.get(name or "")
        line = self.where if place is None else f"{self.where}, line {place.line}, {name}"
        shown = [f"{'>' if node.name == name else ' '} {node}" for node in self.nodes.values()]
        return GraphError("\n".join([f"{line}: {what.rstrip('.')}.", *shown]))


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
        raise ConfigError(f"There is no component graph {name!r}; {meant} Your own goes by its file.")
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
    listed, lines = _listed(text, where)
    nodes = {name: _node(name, entry, lines[name], where) for name, entry in listed.items()}
    graph = Graph(where, text, nodes)
    for name in REQUIRED:
        if name not in nodes:
            raise graph.wrong(f"there is no {name}; a graph has {', '.join(REQUIRED)}")
    for node in nodes.values():
        _check_sources(graph, node)
    try:
        order = list(TopologicalSorter({node.name: node.sources for node in nodes.values()}).static_order())
    except CycleError as error:
        cycle = error.args[1]
        raise graph.wrong(f"it reads itself: {' -> '.join(reversed(cycle))}", cycle[-1]) from None
    needed = _ancestors(nodes, (ACTION, VALUE))
    for name in nodes:
        if name not in needed:
            raise graph.wrong(f"nobody reads {name}: neither {ACTION} nor {VALUE} needs it", name)
    return Graph(where, text, {name: nodes[name] for name in order})


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


def _node(name: str, entry: Any, line: int, where: str) -> Node:
    place = f"{where}, line {line}, {name}"
    if not name.isidentifier() or name in dir(nn.ModuleDict):
        raise GraphError(f"{place}: a component's name is one word of letters, digits and _; choose another.")
    if not isinstance(entry, dict) or not isinstance(entry.get("component"), str):
        raise GraphError(f"{place}: say which component it is, for example component: Linear.")
    options = {key: value for key, value in entry.items() if key not in ("component", "sources")}
    sources = entry.get("sources", [])
    sources = [sources] if isinstance(sources, str) else sources
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise GraphError(f"{place}: sources is a list of names, for example sources: [_obs_].")
    try:
        kind = COMPONENTS.find(entry["component"])
    except HoldfastError as error:
        raise GraphError(f"{place}: {error}") from None
    return Node(name, kind, tuple(sources), options, line)


class _Loader(yaml.SafeLoader):
    """YAML without a silent last-one-wins: a key that comes twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            key, line = self.construct_object(key_node), key_node.start_mark.line + 1
            if key in seen:
                raise GraphError(f"line {line}: there are two {key}; the first is in line {seen[key]}.")
            seen[key] = line
        return super().construct_mapping(node, deep)


def _listed(text: str, where: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Read the components as the file has them, and the line of each."""
    try:
        tree, root = yaml.load(text, _Loader), yaml.compose(text, yaml.SafeLoader)
    except GraphError as error:
        raise GraphError(f"{where}, {error}") from None
    except yaml.YAMLError as error:
        raise GraphError(f"{where} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("components"), dict):
        raise GraphError(f"{where} has no components; write components: and below it a name for each.")
    for key in tree:
        if key not in HEAD:
            raise GraphError(f"{where} has {key!r} beside its components; it may have {' and '.join(HEAD)}.")
    for key_node, value in root.value:
        if key_node.value == "components":
            return tree["components"], {str(k.value): k.start_mark.line + 1 for k, _ in value.value}
    raise AssertionError("the components were there a line ago")
