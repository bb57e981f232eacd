"""Export: a policy as one step that any program can run, memory in and memory out."""

import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Literal, cast

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ConfigError, ContractError
from holdfast.keep.memories import fingerprint
from holdfast.keep.parity import FACTS, require_onnx, some_seen, some_tokens
from holdfast.memory import use_kernel
from holdfast.policies import LSTMWrapper, PurePolicy
from holdfast.shapes import Tensor
from holdfast.version import __version__
from holdfast.worlds import Step
from holdfast.worlds.seen import Seen, parts_of

To = Literal["onnx", "torch"]
Names = str | dict[str, "Names"]
SUFFIX: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
TRACED = 3
"""How many rows a step is traced with: not 1, which tracing would take for the only number there is."""
LOUD = ("torch", "onnxscript", "onnx_ir", "onnx")


class OneStep(nn.Module):
    """A policy as a function of named tensors: observation, memory and flags to scores, value and memory.

    Where `first` is true memory is emptied before it reads, as everywhere; observations and scores are in
    the words of the world the policy is bound to.
    """

    def __init__(self, policy: PurePolicy) -> None:
        super().__init__()
        if policy.binding.spec is None:
            raise ContractError("This policy is bound to no world yet; call policy.bind(world.spec).")
        self.policy, self.spec = policy, policy.binding.spec
        self.leaves = policy.store.leaves
        self.names = _names(self.spec.sight, "obs")
        self.outputs = ("logits", "value", *(f"{leaf}_out" for leaf in self.leaves))

    def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Think about one step of each row."""
        clear, policy = given["first"], self.policy
        rows = clear.shape[0]
        state = TensorDict({leaf: given[f"{leaf}_in"] for leaf in self.leaves}, batch_size=[rows])
        if policy.clear_on == "never":
            clear = torch.zeros_like(clear)
        if policy.clear_on == "trial":
            clear = clear | given["trial"]
        thoughts, after = policy.unroll(_gathered(self.names, given, rows), clear, state)
        said = (thoughts.logits, thoughts.values, *(after[leaf] for leaf in self.leaves))
        return dict(zip(self.outputs, said, strict=True))

    def draw(self, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Make random inputs of so many rows, named and in order, with empty memories."""
        if self.spec.features:
            given = {"obs": some_tokens(self.spec, rows, generator)}
        else:
            given = _spread(self.names, some_seen(self.spec.sight, rows, generator))
        state = self.policy.lstm.cell.initial(rows)
        given |= {f"{leaf}_in": state[leaf].clone() for leaf in self.leaves}
        flags = ("first", "trial") if self.policy.clear_on == "trial" else ("first",)
        given |= {flag: torch.rand(rows, generator=generator) < 0.5 for flag in flags}
        return {name: tensor.to(next(self.policy.parameters()).device) for name, tensor in given.items()}

    def ask(self, step: Step, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Name what goes in at a step of a world; without a memory it is empty."""
        given = {"obs": step.obs} if self.spec.features else _spread(self.names, step.obs)
        state = self.policy.lstm.cell.initial(len(step.first))
        given |= {f"{leaf}_in": memory.get(f"{leaf}_in", state[leaf]) for leaf in self.leaves}
        given |= {"first": step.first} | ({"trial": step.trial} if self.policy.clear_on == "trial" else {})
        return cast("dict[str, Tensor]", given)

    def facts(self, world: str) -> dict[str, str]:
        """Tell in words what a program must know that runs the step."""
        return {
            "holdfast": __version__,
            "world": world,
            "actions": json.dumps(self.spec.action_names),
            "logits": repr(self.policy.actions),
            "clear_on": self.policy.clear_on,
            "weights": fingerprint(self.policy),
        }


def one_step(policy: LSTMWrapper) -> OneStep:
    """Take a policy as one step in float32; one written by hand keeps its memory to itself: refused."""
    if not isinstance(policy, PurePolicy):
        raise ConfigError(
            f"{type(policy).__name__} is written by hand around self.lstm: its memory is neither an input "
            "nor an output of it, so it cannot be exported. Inherit RecurrentPolicy: write encode and decode."
        )
    # Kernels of ours and products in bfloat16 are not what other programs can run.
    policy = copy.deepcopy(policy)
    policy.precision = "float32"
    use_kernel(policy, "torch")
    return OneStep(policy).eval()


def write_exported(step: OneStep, file: Path, to: To, world: str) -> None:
    """Export a step to a file, with its names and what they mean."""
    told = step.facts(world)
    if to == "onnx":
        require_onnx()
    with _quiet():
        program = _traced(step)
        if to == "torch":
            torch.export.save(program, file, extra_files={FACTS: json.dumps(told)})
        else:
            _write_onnx(program, step, file, told)


def _traced(step: OneStep) -> torch.export.ExportedProgram:
    given = step.draw(TRACED, torch.Generator().manual_seed(0))
    batch = torch.export.Dim("batch", min=1)
    shapes = {"given": {name: {0: batch} for name in given}}
    try:
        with torch.no_grad():
            return torch.export.export(step, (given,), dynamic_shapes=shapes, strict=True)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())[:300]
        raise ContractError(f"{type(step.policy).__name__} cannot be exported: {reason}") from error


def _write_onnx(
    program: torch.export.ExportedProgram, step: OneStep, file: Path, told: Mapping[str, str]
) -> None:
    _index_by_long(program.graph_module.graph)
    names = list(step.draw(1, torch.Generator()))
    made = torch.onnx.export(
        program,
        input_names=names,
        output_names=list(step.outputs),
        dynamic_shapes={"given": {name: {0: "batch"} for name in names}},
        dynamo=True,
        verbose=False,
    )
    assert made is not None, "an export gives a program"
    made.model.metadata_props.update(told)
    made.save(file)


def _index_by_long(graph: torch.fx.Graph) -> None:
    """Let every lookup go by 64-bit numbers: ONNX knows no others there."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        with graph.inserting_before(node):
            table, places = node.args
            node.args = (table, [_as_long(graph, place) for place in places])


def _as_long(graph: torch.fx.Graph, place: torch.fx.Node | None) -> torch.fx.Node | None:
    if place is None or place.meta["val"].dtype != torch.int32:
        return place
    wide = graph.call_function(torch.ops.aten.to.dtype, (place, torch.int64))
    wide.meta["val"] = place.meta["val"].long()
    return wide


def _names(space: spaces.Space[Any], name: str) -> Names:
    """Name every tensor of an observation: `obs`, or `obs.image` and so on, as a tree of names."""
    parts = parts_of(space)
    return {key: _names(part, f"{name}.{key}") for key, part in parts.items()} if parts else name


def _spread(names: Names, obs: Seen) -> dict[str, Tensor]:
    """Take an observation apart into its named tensors."""
    if isinstance(names, str):
        return {names: cast("Tensor", obs)}
    found: dict[str, Tensor] = {}
    for key, part in names.items():
        found |= _spread(part, cast("TensorDict", obs)[key])
    return found


def _gathered(names: Names, given: Mapping[str, Tensor], rows: int) -> Seen:
    """Put an observation together from its named tensors."""
    if isinstance(names, str):
        return given[names]
    return TensorDict({key: _gathered(part, given, rows) for key, part in names.items()}, batch_size=[rows])


@contextmanager
def _quiet() -> Iterator[None]:
    """Let the exporters say nothing: what is told is what was checked."""
    levels = {name: logging.getLogger(name).level for name in LOUD}
    for name in LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
