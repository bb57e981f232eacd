"""Adapter of modules `(x, state) -> (y, state)`, with or without episode starts, in any order and layout."""

import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils import _pytree as pytree

from holdfast.check.adapters.base import Outputs, PolicyAdapter
from holdfast.check.adapters.call_signature import NO_STATE, CallSignature, flag_values, split_result
from holdfast.check.adapters.generic import ObsShape, first_width, named_outputs, random_obs
from holdfast.check.adapters.initial_states import initial_from_method, zero_states
from holdfast.check.compare import RowAxes, State, register_dataclasses, state_leaves, with_leaves
from holdfast.check.held_memory import copy_policy
from holdfast.check.script import StepBatch
from holdfast.errors import ConfigError, ContractError, error_text
from holdfast.rng import isolated_rng
from holdfast.types import Tensor

Layout = Literal["time first", "batch first", "step"]
"""What `x` is: `[T,B,...]`, `[B,T,...]` or `[B,...]`."""
NO_INITIAL = "it has no method that makes an initial state"
SHAPES = {"time first": "[T,B,...]", "batch first": "[B,T,...]", "step": "[B,...]"}

CALL_HINT = (
    " If its forward is right, give the observation shape by --obs (in Python obs=), or its initial state: "
    "holdfast.check.adapters.RawModule(module, initial=lambda module, rows: ...)."
)
STATE_HINT = (
    " Take and return its state: def forward(self, x, state, first): ... return y, state. A module that keeps it on "
    "self is checked by functions that set and read it: holdfast.check.adapters.Functions."
)


class RawModule(PolicyAdapter):
    """A module called `y, state = module(x, state)`, or with episode starts too.

    Parameters are recognized by their names (`call_signature`). `y` is a tensor or several. A module without a
    parameter for episode starts is cleared by its caller, so `clear` cannot be measured. `initial(module, rows)` makes
    the initial state of a module that cannot be called with None.
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
        compiled = module
        # A compiled module compiles anew for every copy; its original computes the same.
        module = getattr(module, "_orig_mod", module)
        self._signature = CallSignature.of(module.forward)
        self._draw, self._make_initial = random_obs(obs, module), initial
        self.sees_first = self._signature.sees_first
        self._inverted, self._takes_none = False, False
        # Tried on a float32 copy on the CPU, which runs on any machine.
        self.module = _cpu_copy(module)
        self.layout, self._flag_dtype, self._two_rows, self._rows = self._find_width(obs, layout)
        if self.sees_first:
            self._inverted = self._flags_are_inverted()
        self.module, self.reads_segments = module, self.layout != "step"
        flags = f", with starts as {self._signature.flag_name}" if self.sees_first else ""
        note = f"called as x {SHAPES[self.layout]}{flags}{', one minus done' if self._masks else ''}"
        self.notes = (f"{note}: inferred by calling it",) if layout is None else (note,)
        self.notes += self._inferred
        self.notes += ("its module before torch.compile was measured",) if compiled is not module else ()

    @property
    def _masks(self) -> bool:
        roles = {parameter.role for parameter in self._signature.parameters}
        return ("mask" in roles) != self._inverted

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it is a torch module."""
        return isinstance(policy, nn.Module)

    def initial(self, rows: int) -> State:
        """Call `initial` or the module's own method, or make zeros like the state of a first call with None."""
        if self._make_initial is not None:
            return register_dataclasses(self._make_initial(self.module, rows))
        if self._own_initial:
            return register_dataclasses(initial_from_method(self.module, rows))
        dtype, zeros = self._weight().dtype, []
        for leaf, axis in zip(state_leaves(self._two_rows), self._rows.axes, strict=True):
            shape = [rows if at == axis else size for at, size in enumerate(leaf.shape)]
            zeros.append(torch.zeros(shape, dtype=dtype if leaf.is_floating_point() else leaf.dtype))
        return with_leaves(self._two_rows, zeros)

    _own_initial = False

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call it with one step."""
        if self.layout == "step":
            return self._call(step, state)
        segment = step[:, None]
        outputs, state = self._call_segment(segment, state)
        return {name: leaf.squeeze(1) for name, leaf in outputs.items()}, state

    def act_from_none(self, step: StepBatch) -> Outputs | None:
        """Act with None as the state, as at the start of a rollout; None if that is not possible."""
        return self.act(step, None)[0] if self._takes_none else None

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Call it with the segment, or step by step."""
        return self._call_segment(batch, state)[0]

    def advance(self, batch: StepBatch, state: State) -> State:
        """Call it with the segment, or step by step."""
        return self._call_segment(batch, state)[1]

    def _call_segment(self, batch: StepBatch, state: State) -> tuple[Outputs, State]:
        if self.layout == "batch first":
            return self._call(batch, state)
        if self.layout == "time first":
            outputs, state = self._call(batch.transposed(), state)
            return {name: leaf.transpose(0, 1) for name, leaf in outputs.items()}, state
        steps = []
        for t in range(batch.batch[1]):
            outputs, state = self.act(batch[:, t], state)
            steps.append(outputs)
        return {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}, state

    def _call(self, batch: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call the module and split its result."""
        ends = batch.terminated, batch.truncated
        flags = flag_values(batch.first, *ends, self._flag_dtype, inverted=self._inverted)
        positional, by_name = self._signature.arguments({"x": batch.obs, "state": state, **flags})
        result = self.module(*positional, **by_name)
        if isinstance(self.module, nn.RNNCellBase):
            # PyTorch's cells return their state only; its first tensor is the output.
            return {"y": result if isinstance(result, Tensor) else result[0]}, result
        outputs, state = split_result(result, state_first=self._signature.state_first)
        return named_outputs("y", outputs), register_dataclasses(state)

    # How it is called.

    def _find_width(self, obs: ObsShape, layout: Layout | None) -> tuple[Layout, torch.dtype, State, RowAxes]:
        """Find how it is called: from None, a state of its own, or zeros; with observations of some width."""
        guesses = [] if self._make_initial is not None else list(zero_states(self.module))
        widest = 0 if obs is not None else first_width(self.module) or 0
        errors = list[ContractError]()
        # The first layer may read observations beside actions, rewards or what was remembered.
        for width in (0, *range(widest - 1, 0, -1)):
            self._draw = random_obs(width, self.module) if width else self._draw
            for make in (self._make_initial, *(guesses[:3] if width else guesses)):
                self._make_initial = make
                try:
                    call = self._find_call(layout)
                except ContractError as error:
                    errors.append(error)
                    continue
                finally:
                    self._make_initial = None if guesses else make
                self._make_initial = make
                self._inferred = (f"observations of {width} numbers: inferred by calling it",) if width else ()
                if guesses and make is not None:
                    shapes = [list(leaf.shape)[-1] for leaf in state_leaves(make(self.module, 1))]
                    self._inferred += (f"initial state of zeros, {', '.join(map(str, shapes))} wide: inferred",)
                return call
        raise errors[0]

    _inferred: tuple[str, ...] = ()

    def _find_call(self, layout: Layout | None) -> tuple[Layout, torch.dtype, State, RowAxes]:
        """Call it in each layout, with flags of each dtype, and infer the batch axes of the state."""
        errors, ranks = dict[str, str](), dict[str, int]()
        for candidate in get_args(Layout) if layout is None else (layout,):
            for dtype in (torch.bool, torch.float32) if self.sees_first else (torch.bool,):
                for own in (False, True):
                    self._own_initial = own and self._make_initial is None
                    try:
                        # A warning does not mean that a call does not fit, not even where warnings are errors.
                        with warnings.catch_warnings():
                            warnings.simplefilter("ignore")
                            two, three = (self._state_of(rows, candidate, dtype) for rows in (2, 3))
                        self._takes_none = not own and self._make_initial is None
                        return candidate, dtype, two, RowAxes.infer(two, three)
                    except Exception as error:
                        # What a call returned says more than why one failed, as one with flags of a wrong dtype does.
                        # A module with an initial state of its own is not meant to be called with None.
                        rank = -1 if NO_INITIAL in str(error) else own + 2 * isinstance(error, ContractError)
                        if rank > ranks.get(SHAPES[candidate], -1):
                            errors[SHAPES[candidate]], ranks[SHAPES[candidate]] = error_text(error, 160), rank
        raise self._call_error(errors)

    def _state_of(self, rows: int, layout: Layout, flag_dtype: torch.dtype) -> State:
        """Call it with some rows and return its state; its outputs must fit the layout."""
        self._flag_dtype, self.layout, steps = flag_dtype, layout, 3
        obs, weight = self.random_obs((rows, steps), torch.Generator().manual_seed(0)), self._weight()
        obs = obs.to(weight) if obs.is_floating_point() else obs
        never = torch.zeros(rows, steps).bool()
        batch = StepBatch(obs, never, never, never, never, ~never, torch.zeros(rows, steps).long())
        batch = batch[:, 0] if layout == "step" else batch
        entry = None
        if self._make_initial is not None or self._own_initial:
            entry = self.initial(rows)
            if not state_leaves(entry):
                raise ContractError(NO_INITIAL)
        with torch.no_grad(), isolated_rng(0):
            outputs, state = self._call(batch.transposed() if layout == "time first" else batch, entry)
        shapes = [list(leaf.shape) for leaf in outputs.values()]
        size = (steps, rows) if layout == "time first" else tuple(batch.first.shape)
        if any(leaf.shape[: len(size)] != size for leaf in outputs.values()) or not state_leaves(state):
            raise ContractError(f"x {list(size)} x {list(obs.shape[2:])} gave y {shapes}")
        if entry is not None and _shapes(state) != _shapes(entry):
            raise ContractError(f"from a state {_shapes(entry)} it returned {_shapes(state)}")
        # Cloned, because a learned initial state is an expanded view of a parameter.
        return pytree.tree_map_only(Tensor, torch.clone, state if entry is None else entry)

    @torch.no_grad()
    def _flags_are_inverted(self) -> bool:
        """Whether a flag of 0 clears the state and a flag of 1 keeps it, where the parameter's name leaves it open."""
        if self._signature.knows_what_flags_mean:
            return False
        depends = []
        for value in (False, True):
            outputs = []
            for seed in (1, 2):
                generator = torch.Generator().manual_seed(seed)
                state = pytree.tree_map_only(
                    Tensor,
                    lambda leaf, g=generator: (
                        torch.rand(leaf.shape, generator=g).to(leaf) if leaf.is_floating_point() else leaf
                    ),
                    self._two_rows,
                )
                obs = self.random_obs((2,), torch.Generator().manual_seed(0))
                obs = obs.to(self._weight()) if obs.is_floating_point() else obs
                first = torch.full((2,), value)
                step = StepBatch(obs, first, first, ~first & first, ~first & first, first | ~first, first.long())
                with isolated_rng(0):
                    outputs.append(list(self.act(step, state)[0].values()))
            depends.append(not all(one.equal(other) for one, other in zip(*outputs, strict=True)))
        return depends == [False, True]

    def _call_error(self, errors: dict[str, str]) -> ContractError:
        """Explain why no layout works; once, if the reason is the same everywhere."""
        name, reasons = type(self.module).__name__, list(dict.fromkeys(errors.values()))
        third = f", with None as initial state and {self._signature.flag_name}" if self.sees_first else ""
        details = "; ".join(f"x {shape}: {reason}" for shape, reason in errors.items())
        details, hint = (reasons[0], "") if len(reasons) == 1 else (details, CALL_HINT)
        if any(reason.endswith(NO_STATE) for reason in reasons):
            hint = STATE_HINT
        return ContractError(f"{name} cannot be called as (x, state) -> (y, state){third}: {details}.{hint}")

    def _weight(self) -> Tensor:
        return next((leaf for leaf in self.module.parameters() if leaf.is_floating_point()), torch.zeros(1))


def _shapes(state: State) -> list[list[int]]:
    return [list(leaf.shape) for leaf in state_leaves(state)]


def _cpu_copy(module: nn.Module) -> nn.Module:
    try:
        return copy_policy(module).cpu().float()
    except Exception as error:
        reason = error_text(error, 300)
        raise ContractError(f"{type(module).__name__} cannot be copied to the CPU: {reason}") from error
