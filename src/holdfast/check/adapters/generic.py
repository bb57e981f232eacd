"""Adapters of modules `(x, state) -> (y, state)`, and of policies given as three functions."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from gymnasium import spaces
from torch import nn
from torch.utils import _pytree as pytree

from holdfast.check.adapters.base import Outputs, PolicyAdapter
from holdfast.check.compare import RowAxes, State, state_leaves, with_leaves
from holdfast.check.script import Draw, StepBatch
from holdfast.errors import ConfigError, ContractError, error_text
from holdfast.types import Tensor

ObsShape = int | tuple[int, ...] | spaces.Space[Any] | None
"""Observations: a width, a shape, a Gymnasium space, or None to read the width from the first layer."""


def random_obs(obs: ObsShape, module: nn.Module) -> Draw:
    """Make a function that draws observations; None means a vector as wide as the policy's first layer."""
    if isinstance(obs, spaces.Discrete):
        count, start = int(obs.n), int(obs.start)
        return lambda size, generator: start + torch.randint(count, size, generator=generator)
    if isinstance(obs, spaces.Box):
        scale, box = random_box(obs), obs.shape
        return lambda size, generator: scale(torch.randn(*size, *box, generator=generator))
    if isinstance(obs, spaces.Space):
        raise ConfigError(
            f"obs={obs}: the check draws Box and Discrete observations; others need a PolicyAdapter with `random_obs`."
        )
    shape = (_width(module),) if obs is None else (obs,) if isinstance(obs, int) else tuple(obs)
    return lambda size, generator: torch.randn(*size, *shape, generator=generator)


def random_box(box: spaces.Box) -> Callable[[Tensor], Tensor]:
    """Make a function that maps normal numbers into a box."""
    low, high = (torch.as_tensor(bound).float() for bound in (box.low, box.high))
    bounded = low.isfinite() & high.isfinite()
    span = torch.where(bounded, high - low, 0.0)
    return lambda normal: torch.where(bounded, low + span * torch.sigmoid(normal), normal.clamp(low, high))


def _width(module: nn.Module) -> int:
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.in_features:
            return layer.in_features
        if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            return layer.input_size
        if not list(layer.children()) and list(layer.parameters()):
            break
    raise ConfigError(
        f"The observation shape of {type(module).__name__} is unknown; give it: check(policy, obs=(4,)), a "
        "Gymnasium space, or --obs 3,84,84 on the command line."
    )


Layout = Literal["time first", "batch first", "step"]
"""What `x` is: `[T,B,...]`, `[B,T,...]` or `[B,...]`."""
SHAPES = {"time first": "[T,B,...]", "batch first": "[B,T,...]", "step": "[B,...]"}


class RawModule(PolicyAdapter):
    """A module called `y, state = module(x, state)`, or `module(x, state, first)`.

    `y` is a tensor or several. A module of two arguments gets no episode starts: its caller clears the
    state, so `clear` cannot be measured. `initial(module, rows)` makes the initial state of a module
    that cannot be called with None.
    """

    def __init__(
        self,
        module: nn.Module,
        obs: ObsShape = None,
        layout: Layout | None = None,
        initial: Callable[[Any, int], State] | None = None,
    ) -> None:
        if layout is not None and layout not in SHAPES:
            raise ConfigError(f"layout={layout!r}: choose from {', '.join(map(repr, get_args(Layout)))}.")
        self._draw, self._make_initial, self.sees_first = random_obs(obs, module), initial, _takes_first(module)
        # Tried on a float32 copy on the CPU, which runs on any machine.
        self.module = _cpu_copy(module)
        self.layout, self._flag_dtype, self._two_rows, self._rows = self._find_call(layout)
        self.module = module
        note = f"called as x {SHAPES[self.layout]}{', with first' if self.sees_first else ''}"
        self.notes = (f"{note}: inferred by calling it",) if layout is None else (note,)

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it is a torch module."""
        return isinstance(policy, nn.Module)

    def initial(self, rows: int) -> State:
        """Call `initial`, or make zeros like the state of a first call with None."""
        if self._make_initial is not None:
            return self._make_initial(self.module, rows)
        dtype, zeros = self._weight().dtype, []
        for leaf, axis in zip(state_leaves(self._two_rows), self._rows.axes, strict=True):
            shape = [rows if at == axis else size for at, size in enumerate(leaf.shape)]
            zeros.append(torch.zeros(shape, dtype=dtype if leaf.is_floating_point() else leaf.dtype))
        return with_leaves(self._two_rows, zeros)

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call it with one step."""
        if self.layout == "step":
            return self._call(step.obs, state, step.first)
        axis = 0 if self.layout == "time first" else 1
        outputs, state = self._call(step.obs.unsqueeze(axis), state, step.first.unsqueeze(axis))
        return {name: leaf.squeeze(axis) for name, leaf in outputs.items()}, state

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Call it with the segment, or step by step."""
        return self._call_segment(batch, state)[0]

    def advance(self, batch: StepBatch, state: State) -> State:
        """Call it with the segment, or step by step."""
        return self._call_segment(batch, state)[1]

    def _call_segment(self, batch: StepBatch, state: State) -> tuple[Outputs, State]:
        if self.layout == "batch first":
            return self._call(batch.obs, state, batch.first)
        if self.layout == "time first":
            outputs, state = self._call(batch.obs.transpose(0, 1), state, batch.first.transpose(0, 1))
            return {name: leaf.transpose(0, 1) for name, leaf in outputs.items()}, state
        steps = []
        for t in range(batch.batch[1]):
            outputs, state = self.act(batch[:, t], state)
            steps.append(outputs)
        return {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}, state

    def _call(self, x: Tensor, state: State, first: Tensor) -> tuple[Outputs, State]:
        """Call the module and split its result: the state is last."""
        flags = (first.to(self._flag_dtype),) if self.sees_first else ()
        result = self.module(x, state, *flags)
        if isinstance(self.module, nn.RNNCellBase):
            # PyTorch's cells return their state only; its first tensor is the output.
            return {"y": result if isinstance(result, Tensor) else result[0]}, result
        if not isinstance(result, tuple | list) or len(result) < 2:
            raise ContractError(f"it returned {type(result).__name__}, not (y, state)")
        *outputs, state = result
        return _named("y", outputs[0] if len(outputs) == 1 else outputs), state

    def _find_call(self, layout: Layout | None) -> tuple[Layout, torch.dtype, State, RowAxes]:
        """Call it in each layout, with flags of each dtype, and infer the batch axes of the state."""
        errors: dict[str, str] = {}
        for candidate in get_args(Layout) if layout is None else (layout,):
            for dtype in (torch.bool, torch.float32) if self.sees_first else (torch.bool,):
                try:
                    two, three = (self._state_of(rows, candidate, dtype) for rows in (2, 3))
                    return candidate, dtype, two, RowAxes.infer(two, three)
                except Exception as error:
                    errors[SHAPES[candidate]] = error_text(error, 160)
        raise self._call_error(errors)

    def _state_of(self, rows: int, layout: Layout, flag_dtype: torch.dtype) -> State:
        """Call it with some rows and return its state; its outputs must fit the layout."""
        self._flag_dtype, steps = flag_dtype, 3
        size = {"time first": (steps, rows), "batch first": (rows, steps), "step": (rows,)}[layout]
        obs, weight = self.random_obs(size, torch.Generator().manual_seed(0)), self._weight()
        obs = obs.to(weight) if obs.is_floating_point() else obs
        with torch.no_grad():
            entry = None if self._make_initial is None else self._make_initial(self.module, rows)
            outputs, state = self._call(obs, entry, torch.zeros(size).bool())
        shapes = [list(leaf.shape) for leaf in outputs.values()]
        if any(leaf.shape[: len(size)] != size for leaf in outputs.values()) or not state_leaves(state):
            raise ContractError(f"x {list(obs.shape)} gave y {shapes}")
        # Cloned, because a learned initial state is an expanded view of a parameter.
        return pytree.tree_map_only(Tensor, torch.clone, state if self._make_initial is None else entry)

    def _call_error(self, errors: dict[str, str]) -> ContractError:
        """Explain why no layout works; once, if the reason is the same everywhere."""
        name, reasons = type(self.module).__name__, list(dict.fromkeys(errors.values()))
        third = ", with None as initial state and `first` as third argument" if self.sees_first else ""
        if len(reasons) == 1:
            return ContractError(f"{name} cannot be called as (x, state) -> (y, state){third}: {reasons[0]}.")
        details = "; ".join(f"x {shape}: {reason}" for shape, reason in errors.items())
        return ContractError(
            f"{name} cannot be called as (x, state) -> (y, state){third}: {details}. Give the observation "
            "shape by obs=, or its initial state: holdfast.check.adapters.RawModule(module, initial=lambda "
            "module, rows: ...)."
        )

    def _weight(self) -> Tensor:
        return next((leaf for leaf in self.module.parameters() if leaf.is_floating_point()), torch.zeros(1))


def _cpu_copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).cpu().float()
    except Exception as error:
        reason = error_text(error, 300)
        raise ContractError(f"{type(module).__name__} cannot be copied to the CPU: {reason}") from error


def _takes_first(module: nn.Module) -> bool:
    """Whether it requires a third argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind in kinds]
    return len(positional) > 2 and positional[2].default is inspect.Parameter.empty


class Functions(PolicyAdapter):
    """A policy given as functions of the module, which the check copies.

    `initial(module, rows) -> state`, `act(module, obs, state, first) -> outputs, state` and
    `replay(module, obs, actions, state, first) -> outputs`, with observations `[A,...]` and `[B,T,...]`.
    Outputs are a tensor, or several in a tuple or a dictionary; `first` is bool. With `ends=True` they
    get `terminated, truncated` in place of `first`. With `no_grad=False`, `act` runs with gradients on,
    as in a trainer that backpropagates through its rollout; the state must then be detached.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        initial: Callable[[Any, int], State],
        act: Callable[..., tuple[Any, State]],
        replay: Callable[..., Any],
        value: Callable[..., Any] | None = None,
        obs: ObsShape = None,
        actions: int = 1,
        ends: bool = False,
        no_grad: bool = True,
        rollouts: int = 2,
        segments: int = 2,
    ) -> None:
        self.module, self.actions = module, actions
        self._initial, self._act, self._replay, self._value = initial, act, replay, value
        self._draw, self._ends, self.rollout_has_grad = random_obs(obs, module), ends, not no_grad
        self.rollouts, self.segments = rollouts, segments

    def initial(self, rows: int) -> State:
        """Call the given function."""
        return self._initial(self.module, rows)

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call the given function."""
        outputs, state = self._act(self.module, step.obs, state, *self._flags(step))
        return _output_dict(outputs), state

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Call the given function."""
        return _output_dict(self._replay(self.module, batch.obs, batch.action, state, *self._flags(batch)))

    def value(self, step: StepBatch, state: State) -> Outputs:
        """Call the given function, or act and drop the state."""
        if self._value is None:
            return super().value(step, state)
        return _output_dict(self._value(self.module, step.obs, state, *self._flags(step)))

    def _flags(self, batch: StepBatch) -> tuple[Tensor, ...]:
        return (batch.terminated, batch.truncated) if self._ends else (batch.first,)


def _output_dict(outputs: Any) -> Outputs:
    return dict(outputs) if isinstance(outputs, Mapping) else _named("output", outputs)


def _named(name: str, outputs: Any) -> Outputs:
    """Name outputs by their path in tuples, lists and dictionaries."""
    leaves, _ = pytree.tree_flatten_with_path(outputs)
    return {f"{name}{pytree.keystr(path)}": leaf for path, leaf in leaves}
