"""`ComponentPolicy`: a policy that is a graph of named components, read from YAML."""

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ContractError, HoldfastError, error_text
from holdfast.memory import Cell, MemoryInit, MultiCell, find_cell
from holdfast.memory.cell import Mask
from holdfast.memory.episode_resets import ClearOn
from holdfast.policies.components import layers
from holdfast.policies.components.graph import ACTION, CORE, OBS, VALUE, Graph, find_graph
from holdfast.policies.components.layers import Component, MemoryComponent, Shape, shape_text
from holdfast.policies.distributions import distribution_for
from holdfast.policies.encoders import TokensToBox as Box
from holdfast.policies.recurrent_policy import FunctionalPolicy, PolicyOutput, PolicyStep, autocast, full_precision
from holdfast.types import Tensor
from holdfast.worlds import tokens
from holdfast.worlds.obs import Obs, zero_obs
from holdfast.worlds.step import WorldSpec

WORLD = ""
"""The name of the observation itself among the outputs of components."""


class ComponentPolicy(FunctionalPolicy):
    """A graph of components, each a function of its sources' outputs.

    Components without memory compute all steps at once; those with memory run step by step or over a
    segment. The states of all memories are one state: stored, replayed, cleared and saved together.
    """

    compiled_methods = ("run_stage",)

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
        options = {"hidden_size": hidden_size, "num_layers": num_layers, "name": memory, "init": memory_init}
        built, shapes = _build(graph, spec, {key: value for key, value in options.items() if value})
        memories = {name: part.cell for name, part in built.items() if isinstance(part, MemoryComponent)}
        core = memories[CORE]
        super().__init__(
            core.input_size,
            core.hidden_size,
            core.num_layers,
            memory=core if len(memories) == 1 else MultiCell(memories),
            clear_on=clear_on,
        )
        self.actions = distribution_for(spec)
        self.graph = graph
        self.shapes: Mapping[str, Shape] = shapes
        self.components = nn.ModuleDict({name: part for name, part in built.items() if name not in memories})
        self.stages = _stages(graph, memories)
        self.accepts_trimmed_obs = graph.nodes[OBS].kind.accepts_trimmed_obs
        _register_readers(graph, self.components)
        self._dry_run(spec, built)

    def run_stage(self, number: int, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the components without memory of one stage."""
        outputs = dict(outputs)
        for name in self.stages[number][0]:
            sources = [WORLD] if name == OBS else self.graph.nodes[name].sources
            component, inputs = self.components[name], [outputs[source] for source in sources]
            is_head = name in (ACTION, VALUE)
            outputs[name] = full_precision(component, *inputs) if is_head else component(*inputs)
        return outputs

    def unroll(self, obs: Obs, first: Mask, state: TensorDict, valid: Mask | None = None) -> PolicyStep:
        """Run the graph, stage by stage."""
        batch, cell = first.shape, self.lstm.cell
        states = cell.split(state) if isinstance(cell, MultiCell) else {CORE: state}
        cells: Mapping[str, Cell] = cell.cells if isinstance(cell, MultiCell) else {CORE: cell}
        outputs: dict[str, Any] = {WORLD: self._prepare(obs, valid).flatten(0, len(batch) - 1)}
        after: dict[str, TensorDict] = {}
        with autocast(self.precision, first.device):
            for number, (_, memories) in enumerate(self.stages):
                outputs = self._call_compiled("run_stage", number, outputs)
                for name in memories:
                    (source,) = self.graph.nodes[name].sources
                    x = outputs[source].unflatten(0, batch)
                    y, after[name] = cells[name](x, states[name], first, valid)
                    outputs[name] = y.flatten(0, len(batch) - 1)
        logits, values = outputs[ACTION].unflatten(0, batch), outputs[VALUE].squeeze(-1).unflatten(0, batch)
        if valid is not None:
            # A path around the memory must not let invalid observations through.
            logits, values = torch.where(valid[..., None], logits, 0.0), torch.where(valid, values, 0.0)
        state = cell.join(after) if isinstance(cell, MultiCell) else after[CORE]
        return self._finish(PolicyOutput(logits, values)), state

    @torch.no_grad()
    def _dry_run(self, spec: WorldSpec, built: Mapping[str, Component]) -> None:
        """Run every component once on blank observations, and check the shape of its output."""
        blank = tokens.empty(2, spec.obs_shape[0]) if spec.features else zero_obs(spec.observation_space, rows=2)
        outputs: dict[str, Any] = {WORLD: blank}
        for name, node in self.graph.nodes.items():
            if issubclass(node.kind, MemoryComponent):
                outputs[name] = torch.zeros(2, *(size or 0 for size in self.shapes[name]))
                continue
            inputs = [outputs[source] for source in ([WORLD] if name == OBS else node.sources)]
            try:
                if name in self.stages[0][0]:
                    built[name].begin(*inputs)
                outputs[name] = self.components[name](*inputs)
            except Exception as error:
                raise self.graph.error(_failure(error), name) from error
            _require_shape(self.graph, name, self.shapes[name], outputs[name])


def _build(
    graph: Graph, spec: WorldSpec, memory_options: Mapping[str, Any]
) -> tuple[dict[str, Component], dict[str, Shape]]:
    """Build the components in order, each from the shapes of its sources."""
    built: dict[str, Component] = {}
    shapes: dict[str, Shape] = {}
    for name, node in graph.nodes.items():
        try:
            component = built[name] = layers.make_component(node.kind, node.options)
            if isinstance(component, MemoryComponent):
                if type(component) not in (MemoryComponent, layers.LSTMComponent):
                    raise ContractError("a memory of your own is a cell: Memory with cell: package.module:Class")
                component.options |= memory_options
            shape = component.build([shapes[source] for source in node.sources], spec)
            if not isinstance(shape, tuple):
                raise ContractError(f"build returns the shape of the output, such as (32,); it returned {shape}")
            shapes[name] = shape
        except HoldfastError as error:
            raise graph.error(str(error), name) from error
        except Exception as error:
            raise graph.error(_failure(error), name) from error
    if not isinstance(built[CORE], MemoryComponent):
        raise graph.error(f"{CORE} must be a memory; {type(built[CORE]).__name__} is not one", CORE)
    required: dict[str, Shape] = {ACTION: (distribution_for(spec).size,), VALUE: (1,)}
    for name, shape in required.items():
        if shapes[name] != shape:
            raise graph.error(f"it must give {shape_text(shape)}; it gives {shape_text(shapes[name])}", name)
    return built, shapes


def _failure(error: Exception) -> str:
    """Return what failed inside a component, and where in its file."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"it fails: {error_text(error)} ({Path(last.filename).name}, line {last.lineno})"


def _stages(graph: Graph, memories: Mapping[str, Cell]) -> list[tuple[list[str], list[str]]]:
    """Split the graph into stages: components without memory, then the memories that read them."""
    depth: dict[str, int] = {}
    for name, node in graph.nodes.items():
        depth[name] = max((depth[source] + (source in memories) for source in node.sources), default=0)
    stages: list[tuple[list[str], list[str]]] = [([], []) for _ in range(max(depth.values()) + 1)]
    for name in graph.nodes:
        stages[depth[name]][name in memories].append(name)
    return stages


def _register_readers(graph: Graph, components: nn.ModuleDict) -> None:
    """Register the layers that read a token box's channels, so that new features widen them."""
    boxes: dict[str, tuple[Box, int]] = {}
    for name, node in graph.nodes.items():
        component = dict(components.items()).get(name)
        if isinstance(component, layers.TokensToBoxComponent):
            boxes[name] = (component.box, 1)
        for source in node.sources:
            if source not in boxes:
                continue
            box, cells = boxes[source]
            if isinstance(component, layers.Linear | layers.Conv2d):
                box.readers.append((component.layer, cells))
            elif isinstance(component, layers.Centre | layers.Flatten):
                all_cells = isinstance(component, layers.Flatten) and source == OBS
                boxes[name] = (box, box.rows * box.columns if all_cells else cells)
            else:
                box.closed = f"{name} ({node.kind.__name__})"


def _require_shape(graph: Graph, name: str, shape: Shape, output: Any) -> None:
    tensor = output.tokens if isinstance(output, layers.Vectors) else output
    if not isinstance(tensor, Tensor):
        raise graph.error(f"its output is a tensor; it gives {type(output).__name__}", name)
    rows = tensor.shape if graph.nodes[name].kind.reads == "nothing" else tensor.shape[1:]
    if len(rows) != len(shape) or any(size not in (None, side) for size, side in zip(shape, rows, strict=True)):
        raise graph.error(f"it must give {shape_text(shape)}; it gives {list(rows)}", name)
