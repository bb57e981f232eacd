"""`ComponentPolicy`: a policy that is a graph of named components, read from YAML."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ContractError, HoldfastError
from holdfast.memory import Bundle, Cell, MemoryInit, find_cell
from holdfast.policies.actions import actions_of
from holdfast.policies.clock import ClearOn
from holdfast.policies.components import LSTM, Component, Memory, Shape, make_component
from holdfast.policies.components.component import tell
from holdfast.policies.components.layers import Centre, Conv2d, Flatten, Linear
from holdfast.policies.components.tokens import TokensToBox, Vectors
from holdfast.policies.encoders import TokensToBox as Box
from holdfast.policies.graph import ACTION, CORE, OBS, VALUE, Graph, find_graph
from holdfast.policies.precision import in_full
from holdfast.policies.template import PurePolicy, Thoughts
from holdfast.shapes import Bool, Tensor
from holdfast.worlds import tokens
from holdfast.worlds.seen import Seen, nothing_seen
from holdfast.worlds.step import WorldSpec

WORLD = ""
"""The name of the observation itself among the outputs of components."""


class ComponentPolicy(PurePolicy):
    """A graph of components, each thinking about what its sources say.

    Components without a memory see all steps at once; those with one are called step by step or over a
    segment. However many remember, their states are one memory: stored, replayed, cleared and saved
    together.
    """

    parts = ("run_stage",)

    def __init__(
        self,
        spec: WorldSpec,
        graph: Graph | str,
        hidden_size: int | None = None,
        num_layers: int | None = None,
        *,
        memory: str | None = None,
        memory_init: MemoryInit | None = None,
        clear_on: ClearOn = "episode",
    ) -> None:
        graph = find_graph(graph) if isinstance(graph, str) else graph
        if memory is not None:
            find_cell(memory)
        asked = {"hidden_size": hidden_size, "num_layers": num_layers, "name": memory, "init": memory_init}
        built, shapes = _build(graph, spec, {key: value for key, value in asked.items() if value})
        memories = {name: part.cell for name, part in built.items() if isinstance(part, Memory)}
        core = memories[CORE]
        super().__init__(
            core.input_size,
            core.hidden_size,
            core.num_layers,
            memory=core if len(memories) == 1 else Bundle(memories),
            clear_on=clear_on,
        )
        self.actions = actions_of(spec)
        self.graph = graph
        self.shapes: Mapping[str, Shape] = shapes
        self.components = nn.ModuleDict({name: part for name, part in built.items() if name not in memories})
        self.stages = _stages(graph, memories)
        self.any_length = graph.nodes[OBS].kind.any_length
        _connect(graph, self.components)
        self._try_out(spec, built)

    def run_stage(self, number: int, known: Mapping[str, Any]) -> dict[str, Any]:
        """Let the components that remember nothing think, up to the next ones that do."""
        outputs = dict(known)
        for name in self.stages[number][0]:
            sources = [WORLD] if name == OBS else self.graph.nodes[name].sources
            part, heard = self.components[name], [outputs[source] for source in sources]
            outputs[name] = in_full(part, *heard) if name in (ACTION, VALUE) else part(*heard)
        return outputs

    def think(
        self,
        obs: Seen,
        first: Bool[Tensor, "B *T"],
        state: TensorDict,
        valid: Bool[Tensor, "B *T"] | None,
    ) -> tuple[Thoughts, TensorDict]:
        """Run the graph, stage by stage."""
        batch, cell = first.shape, self.lstm.cell
        states = cell.split(state) if isinstance(cell, Bundle) else {CORE: state}
        cells: Mapping[str, Cell] = cell.cells if isinstance(cell, Bundle) else {CORE: cell}
        known: dict[str, Any] = {WORLD: obs.flatten(0, len(batch) - 1)}
        after: dict[str, TensorDict] = {}
        for number, (_, remembering) in enumerate(self.stages):
            known = self.call_part("run_stage", number, known)
            for name in remembering:
                (source,) = self.graph.nodes[name].sources
                x = known[source].unflatten(0, batch)
                y, after[name] = cells[name](x, states[name], first, valid)
                known[name] = y.flatten(0, len(batch) - 1)
        scores, values = known[ACTION].unflatten(0, batch), known[VALUE].squeeze(-1).unflatten(0, batch)
        if valid is not None:
            # A graph may lead around its memory: what is shown where nobody acts must not be felt.
            scores, values = torch.where(valid[..., None], scores, 0.0), torch.where(valid, values, 0.0)
        thoughts = Thoughts(scores, values)
        return thoughts, cell.join(after) if isinstance(cell, Bundle) else after[CORE]

    @torch.no_grad()
    def _try_out(self, spec: WorldSpec, built: Mapping[str, Component]) -> None:
        """Show every component nothing, once: a shape that was told must be the shape that comes."""
        nothing = tokens.empty(2, spec.obs_shape[0]) if spec.features else nothing_seen(spec.sight, rows=2)
        known: dict[str, Any] = {WORLD: nothing}
        for name, node in self.graph.nodes.items():
            if issubclass(node.kind, Memory):
                known[name] = torch.zeros(2, *(size or 0 for size in self.shapes[name]))
                continue
            inputs = [known[source] for source in ([WORLD] if name == OBS else node.sources)]
            try:
                if name in self.stages[0][0]:
                    built[name].begin(*inputs)
                known[name] = self.components[name](*inputs)
            except Exception as error:
                raise self.graph.wrong(_failure(error), name) from error
            _require_shape(self.graph, name, self.shapes[name], known[name])


def _build(
    graph: Graph, spec: WorldSpec, asked: Mapping[str, Any]
) -> tuple[dict[str, Component], dict[str, Shape]]:
    """Make the components in order, each told the shapes of its sources."""
    built: dict[str, Component] = {}
    shapes: dict[str, Shape] = {}
    for name, node in graph.nodes.items():
        try:
            component = built[name] = make_component(node.kind, node.options)
            if isinstance(component, Memory):
                if type(component) not in (Memory, LSTM):
                    raise ContractError(
                        "a memory of your own is a cell: Memory with cell: package.module:Class"
                    )
                component.how |= asked
            shape = component.build([shapes[source] for source in node.sources], spec)
            if not isinstance(shape, tuple):
                raise ContractError(
                    f"build returns the shape of the output, such as (32,); it returned {shape}"
                )
            shapes[name] = shape
        except HoldfastError as error:
            raise graph.wrong(str(error), name) from error
        except Exception as error:
            raise graph.wrong(_failure(error), name) from error
    if not isinstance(built[CORE], Memory):
        raise graph.wrong(f"{CORE} remembers; {type(built[CORE]).__name__} does not", CORE)
    wanted: dict[str, Shape] = {ACTION: (actions_of(spec).size,), VALUE: (1,)}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise graph.wrong(f"it must give {tell(shape)}; it gives {tell(shapes[name])}", name)
    return built, shapes


def _failure(error: Exception) -> str:
    """Say what went wrong inside a component, and where in its file."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    told = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"it fails: {told} ({Path(last.filename).name}, line {last.lineno})"


def _stages(graph: Graph, memories: Mapping[str, Cell]) -> list[tuple[list[str], list[str]]]:
    """Put the graph in stages: what can be thought before a memory is read, then the memories read there."""
    depth: dict[str, int] = {}
    for name, node in graph.nodes.items():
        depth[name] = max((depth[source] + (source in memories) for source in node.sources), default=0)
    stages: list[tuple[list[str], list[str]]] = [([], []) for _ in range(max(depth.values()) + 1)]
    for name in graph.nodes:
        stages[depth[name]][name in memories].append(name)
    return stages


def _connect(graph: Graph, components: nn.ModuleDict) -> None:
    """Tell a token box which layers read its channels, so that they are widened when features are added."""
    handed: dict[str, tuple[Box, int]] = {}
    for name, node in graph.nodes.items():
        part = dict(components.items()).get(name)
        if isinstance(part, TokensToBox):
            handed[name] = (part.box, 1)
        for source in node.sources:
            if source not in handed:
                continue
            box, cells = handed[source]
            if isinstance(part, Linear | Conv2d):
                box.readers.append((part.layer, cells))
            elif isinstance(part, Centre | Flatten):
                whole = isinstance(part, Flatten) and source == OBS
                handed[name] = (box, box.rows * box.columns if whole else cells)
            else:
                box.closed = f"{name} ({node.kind.__name__})"


def _require_shape(graph: Graph, name: str, told: Shape, came: Any) -> None:
    tensor = came.tokens if isinstance(came, Vectors) else came
    if not isinstance(tensor, Tensor):
        raise graph.wrong(f"its output is a tensor; it gives {type(came).__name__}", name)
    rows = tensor.shape if graph.nodes[name].kind.reads == "nothing" else tensor.shape[1:]
    same = len(rows) == len(told) and all(a in (b, None) for a, b in zip(told, rows, strict=True))
    if not same:
        raise graph.wrong(f"it was to give {tell(told)} and gives {list(rows)}", name)
