"""ONNX and torch.export, compared with the policy."""

import copy
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from holdfast.errors import ConfigError, ContractError
from holdfast.install import install_command
from holdfast.memory import use_kernel
from holdfast.play.saved_memory import weights_hash
from holdfast.policies import FunctionalPolicy, LSTMWrapper
from holdfast.types import Tensor
from holdfast.version import __version__
from holdfast.worlds import Step, World, WorldSpec
from holdfast.worlds.obs import Obs, empty_obs, space_bounds, subspaces

RunStep = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""One step: inputs by name to outputs by name."""
METADATA = "holdfast.json"
"""Name of the metadata inside a torch file."""
RESTART = 0.1
"""Probability of an episode start in random steps."""
To = Literal["onnx", "torch"]
SUFFIX: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
TRACED = 3
"""Rows of the traced example: not 1, which tracing would specialize on."""


def random_obs(space: spaces.Space[Any], rows: int, generator: torch.Generator) -> Obs:
    """Draw random observations inside a space."""
    fields = subspaces(space)
    if fields:
        leaves = {name: random_obs(field, rows, generator) for name, field in fields.items()}
        return TensorDict(leaves, batch_size=[rows])
    empty = empty_obs(space)
    shape = (rows, *empty.shape[1:])
    low, high = (torch.as_tensor(bound.astype(np.float64)) for bound in space_bounds(space))
    if empty.is_floating_point():
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.maximum(torch.minimum(normal, high), low).to(empty.dtype)
    uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
    return (low + (uniform * (high - low + 1)).floor()).to(empty.dtype)


def random_tokens(spec: WorldSpec, rows: int, generator: torch.Generator) -> Tensor:
    """Draw random tokens: mostly of the world's features, some of any byte, which policies must ignore.

    Values stay within the normalizations: far larger ones would be rounded more coarsely.
    """
    obs = torch.randint(0, 256, (rows, *spec.obs_shape), generator=generator, dtype=torch.uint8)
    feature_ids = torch.tensor(spec.feature_ids, dtype=torch.uint8)
    index = torch.randint(0, len(feature_ids), obs.shape[:-1], generator=generator)
    any_byte = torch.rand(obs.shape[:-1], generator=generator) < RESTART
    sizes = torch.tensor([min(255, math.ceil(feature.normalization)) for feature in spec.features])
    uniform = torch.rand(index.shape, generator=generator)
    obs[..., 2] = (uniform * (sizes[index] + 1)).floor().clamp(max=255).to(torch.uint8)
    obs[..., 1] = torch.where(any_byte, obs[..., 1], feature_ids[index])
    return obs


def open_exported(file: Path) -> RunStep:
    """Load an exported file as a function of named inputs."""
    if file.suffix != ".onnx":
        module = torch.export.load(file, extra_files={METADATA: ""}).module()
        return lambda inputs: module(dict(inputs))
    require_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Errors only: its warnings are about speed.
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = session.run(names, {name: tensor.cpu().numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(np.asarray(array)) for name, array in zip(names, arrays, strict=True)}

    return run


def require_onnx() -> None:
    """Raise unless the packages for ONNX are installed."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"ONNX needs {', '.join(missing)}: {install_command('export')}.")


class ExportModule(nn.Module):
    """A policy as a function of named tensors: observation, state and flags to logits, value and state.

    Where `first` is true, memory is cleared before it reads. Observations and logits are in the order of
    the world the policy is bound to.
    """

    def __init__(self, policy: FunctionalPolicy) -> None:
        super().__init__()
        if policy.binding.spec is None:
            raise ContractError("This policy is bound to no world yet; call policy.bind(world.spec).")
        self.policy, self.spec = policy, policy.binding.spec
        self.state_keys = policy.store.state_keys
        # Inputs `obs`, or `obs.image` and so on, and where they are in an observation.
        self.obs_paths = {".".join(("obs", *path)): path for path in _leaf_paths(self.spec.observation_space)}
        value = ("value",) if policy.has_values else ()
        self.outputs = ("action", "logits", *value, *(f"{leaf}_out" for leaf in self.state_keys))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Compute one step of each row."""
        clear, policy = inputs["first"], self.policy
        rows = clear.shape[0]
        state = TensorDict({leaf: inputs[f"{leaf}_in"] for leaf in self.state_keys}, batch_size=[rows])
        if policy.clear_on == "never":
            clear = torch.zeros_like(clear)
        if policy.clear_on == "trial":
            clear = clear | inputs["trial"]
        obs = inputs.get("obs")
        if obs is None:
            obs = TensorDict({path: inputs[name] for name, path in self.obs_paths.items()}, batch_size=[rows])
        output, state = policy.unroll(obs, clear, state)
        params = policy.actions.parameters(output.logits)
        action = policy.env_actions(policy.actions.greedy(params))
        value = (output.values,) if policy.has_values else ()
        tensors = (action, output.logits, *value, *(state[leaf] for leaf in self.state_keys))
        return dict(zip(self.outputs, tensors, strict=True))

    def random_inputs(self, rows: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Draw random inputs by name, in order, with zero states."""
        if self.spec.features:
            inputs = {"obs": random_tokens(self.spec, rows, generator)}
        else:
            inputs = self._split_obs(random_obs(self.spec.observation_space, rows, generator))
        state = self.policy.lstm.cell.initial(rows)
        inputs |= {f"{leaf}_in": state[leaf].clone() for leaf in self.state_keys}
        flags = ("first", "trial") if self.policy.clear_on == "trial" else ("first",)
        inputs |= {flag: torch.rand(rows, generator=generator) < 0.5 for flag in flags}
        return {name: tensor.to(next(self.policy.parameters()).device) for name, tensor in inputs.items()}

    def inputs_from(self, step: Step, memory: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs for a step of a world; states missing in `memory` are zero."""
        inputs = self._split_obs(step.obs)
        state = self.policy.lstm.cell.initial(len(step.first))
        inputs |= {f"{leaf}_in": memory.get(f"{leaf}_in", state[leaf]) for leaf in self.state_keys}
        return inputs | {"first": step.first} | ({"trial": step.trial} if self.policy.clear_on == "trial" else {})

    def _split_obs(self, obs: Obs) -> dict[str, Tensor]:
        if isinstance(obs, Tensor):
            return {"obs": obs}
        return {name: obs[path] for name, path in self.obs_paths.items()}

    def next_state(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the states after a step, by the names of the inputs of the next."""
        return {f"{leaf}_in": outputs[f"{leaf}_out"] for leaf in self.state_keys}

    def metadata(self, world: str) -> dict[str, str]:
        """Return the metadata a program needs to run the step."""
        return {
            "holdfast": __version__,
            "world": world,
            "actions": json.dumps(self.spec.action_names),
            "logits": repr(self.policy.actions),
            "clear_on": self.policy.clear_on,
            "weights": weights_hash(self.policy),
        }


@torch.no_grad()
def max_difference(step: ExportModule, exported: RunStep, *, rows: int, steps: int, carry: bool = True) -> float:
    """Run random steps with the policy and its export, and return the largest difference of any output.

    Each carries its own memory; without `carry` both continue from the policy's at every step, because on
    random inputs, unlike any it was trained on, a policy may amplify rounding errors in its memory.
    Episodes start at random, and in all rows at the first step. Differences are relative where numbers are
    above 1: |a - b| / max(1, |a|).
    """
    generator = torch.Generator().manual_seed(0)
    inputs = step.random_inputs(rows, generator)
    states = [{name: inputs[name] for name in inputs if name.endswith("_in")}] * 2
    largest = 0.0
    for number in range(steps):
        inputs = step.random_inputs(rows, generator)
        first = (torch.rand(rows, generator=generator) < RESTART) | (number == 0)
        inputs["first"] = first.to(inputs["first"].device)
        outputs = [dict(run({**inputs, **state})) for run, state in zip((step, exported), states, strict=True)]
        states = [step.next_state(output) for output in (outputs if carry else [outputs[0]] * 2)]
        largest = max(largest, _difference(*outputs))
    return largest


@torch.no_grad()
def difference_in_world(step: ExportModule, exported: RunStep, world: World, *, steps: int) -> float:
    """Run steps of a world with both, each with its own memory; the policy acts. Return the largest difference."""
    world_step, largest, states = world.reset(), 0.0, [dict[str, Tensor](), dict[str, Tensor]()]
    for _ in range(steps):
        inputs = [step.inputs_from(world_step, state) for state in states]
        outputs = [dict(run(tensors)) for run, tensors in zip((step, exported), inputs, strict=True)]
        states = [step.next_state(output) for output in outputs]
        largest = max(largest, _difference(*outputs))
        world_step = world.step(outputs[0]["action"])
    return largest


def _difference(expected: Mapping[str, Tensor], actual: Mapping[str, Tensor]) -> float:
    largest = 0.0
    for name, a in expected.items():
        if name == "action" and not a.is_floating_point():
            # The logits decide: where two are equal but for rounding, either action is right.
            continue
        a, b = a.double().cpu(), actual[name].double().cpu()
        error = ((a - b).abs() / a.abs().clamp(min=1)).nan_to_num(nan=float("inf"), posinf=float("inf"))
        largest = max(largest, float(error.max())) if error.numel() else largest
    return largest


def export_module(policy: LSTMWrapper) -> ExportModule:
    """Return a policy as one step in float32; hand-written policies are rejected."""
    if not isinstance(policy, FunctionalPolicy):
        raise ConfigError(
            f"{type(policy).__name__} is written by hand around self.lstm: its memory is neither an input "
            "nor an output of it, so it cannot be exported. Inherit RecurrentPolicy: write encode and decode."
        )
    # Other programs can run neither Triton kernels nor autocast.
    policy = copy.deepcopy(policy)
    policy.precision = "float32"
    use_kernel(policy, "torch")
    return ExportModule(policy).eval()


def write_exported(step: ExportModule, file: Path, to: To, world: str) -> None:
    """Export a step to a file, with names and metadata."""
    metadata = step.metadata(world)
    inputs = step.random_inputs(TRACED, torch.Generator().manual_seed(0))
    if to == "onnx":
        require_onnx()
    with _quiet():
        program = _trace(step, inputs)
        if to == "torch":
            torch.export.save(program, file, extra_files={METADATA: json.dumps(metadata)})
            return
        _index_by_int64(program.graph_module.graph)
        onnx_program = torch.onnx.export(
            program,
            input_names=list(inputs),
            output_names=list(step.outputs),
            dynamic_shapes={"inputs": {name: {0: "batch"} for name in inputs}},
            dynamo=True,
            verbose=False,
        )
        assert onnx_program is not None, "an export gives a program"
        onnx_program.model.metadata_props.update(metadata)
        onnx_program.save(file)


def _trace(step: ExportModule, inputs: dict[str, Tensor]) -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1)
    shapes = {"inputs": {name: {0: batch} for name in inputs}}
    try:
        with torch.no_grad():
            return torch.export.export(step, (inputs,), dynamic_shapes=shapes, strict=True)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).partition("\n\n")[0].split())[:300]
        raise ContractError(f"{type(step.policy).__name__} cannot be exported: {reason}") from error


def _index_by_int64(graph: torch.fx.Graph) -> None:
    """Cast the indices of every lookup to int64: ONNX takes no others."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index.Tensor):
        table, indices = node.args
        casts = list(indices)
        for place, index in enumerate(casts):
            if index is not None and index.meta["val"].dtype == torch.int32:
                with graph.inserting_before(node):
                    casts[place] = graph.call_function(torch.ops.aten.to.dtype, (index, torch.int64))
                casts[place].meta["val"] = index.meta["val"].long()
        node.args = (table, casts)


def _leaf_paths(space: spaces.Space[Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the keys that lead to each tensor of an observation; () if it is one tensor."""
    fields = subspaces(space)
    if not fields:
        yield path
    for key, field in fields.items():
        yield from _leaf_paths(field, (*path, key))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
