"""A bare module `(x, state) -> (y, state)` under test: the check is its trainer."""

import copy
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.utils import _pytree as pytree

from holdfast.check.script import Moments
from holdfast.check.subject import Answer, Subject
from holdfast.check.subjects.sight import Sight, imagine
from holdfast.check.tree import Rows, State, leaves, rebuilt
from holdfast.errors import ConfigError, ContractError
from holdfast.shapes import Tensor

Layout = Literal["time first", "batch first", "step"]
"""What `x` is: `[T,B,...]`, `[B,T,...]` or `[B,...]`."""
SHAPES = {"time first": "[T,B,...]", "batch first": "[B,T,...]", "step": "[B,...]"}


class Bare(Subject):
    """A module called `y, state = module(x, state)`, or `module(x, state, first)` if it needs three things.

    `y` is a tensor or several. One that takes two things is not told where episodes start: whoever
    calls it clears its state, so `clear` cannot be measured; what is proven is that its calls over
    segments give what its single steps give, that it carries and cuts nothing away, and that it keeps
    nothing for itself. `initial(module, rows)` makes the first state of one that cannot be given None.
    """

    def __init__(
        self,
        module: nn.Module,
        obs: Sight = None,
        layout: Layout | None = None,
        initial: Callable[[Any, int], State] | None = None,
    ) -> None:
        if layout is not None and layout not in SHAPES:
            raise ConfigError(f"layout={layout!r}: there is {', '.join(map(repr, get_args(Layout)))}.")
        self._draw, self._given = imagine(obs, module), initial
        self.told_of_starts = _takes_first(module)
        # Tried on a copy that any machine can run; the copy is then let go.
        self.module = _tried(module)
        self.layout, self._flag, self._two_rows, self._rows = self._find_call(layout)
        self.module = module
        told = f"called as x {SHAPES[self.layout]}{', with first' if self.told_of_starts else ''}"
        self.notes = (f"{told}: found by calling it",) if layout is None else (told,)

    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw what it was said to see."""
        return self._draw(size, generator)

    def initial(self, rows: int) -> State:
        """Ask whoever was named for it, or make zeros like the state of a first call with None."""
        if self._given is not None:
            return self._given(self.module, rows)
        weight, empty = self._weight(), []
        for leaf, axis in zip(leaves(self._two_rows), self._rows.axes, strict=True):
            shape = [rows if at == axis else size for at, size in enumerate(leaf.shape)]
            empty.append(torch.zeros(shape, dtype=weight.dtype if leaf.is_floating_point() else leaf.dtype))
        return rebuilt(self._two_rows, empty)

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Call it with one step."""
        if self.layout == "step":
            return self._give(moment.obs, state, moment.first)
        axis = 0 if self.layout == "time first" else 1
        said, state = self._give(moment.obs.unsqueeze(axis), state, moment.first.unsqueeze(axis))
        return {name: leaf.squeeze(axis) for name, leaf in said.items()}, state

    def replay(self, moments: Moments, state: State) -> Answer:
        """Call it with the whole segment, or with step after step if it reads no more at once."""
        if self.layout == "batch first":
            return self._give(moments.obs, state, moments.first)[0]
        if self.layout == "time first":
            said, _ = self._give(moments.obs.transpose(0, 1), state, moments.first.transpose(0, 1))
            return {name: leaf.transpose(0, 1) for name, leaf in said.items()}
        steps = []
        for t in range(moments.batch[1]):
            answer, state = self.act(moments[:, t], state)
            steps.append(answer)
        return {name: torch.stack([step[name] for step in steps], dim=1) for name in steps[0]}

    def over(self, moments: Moments, state: State) -> State:
        """Call it with the whole segment, if it reads more than a step at once."""
        if self.layout == "step":
            return super().over(moments, state)
        x, first = moments.obs, moments.first
        if self.layout == "time first":
            x, first = x.transpose(0, 1), first.transpose(0, 1)
        return self._give(x, state, first)[1]

    def _give(self, x: Tensor, state: State, first: Tensor) -> tuple[Answer, State]:
        """Call it, and take apart what comes out: the state is last."""
        result = self.module(x, state, first.to(self._flag)) if self.told_of_starts else self.module(x, state)
        if isinstance(self.module, nn.RNNCellBase):
            # PyTorch's cells give their state only, and say its first tensor.
            return {"y": result if isinstance(result, Tensor) else result[0]}, result
        if not isinstance(result, tuple | list) or len(result) < 2:
            raise ContractError(f"it returned {type(result).__name__}, not (y, state)")
        *said, state = result
        told, _ = pytree.tree_flatten_with_path(said[0] if len(said) == 1 else said)
        return {f"y{pytree.keystr(path)}": leaf for path, leaf in told}, state

    def _find_call(self, layout: Layout | None) -> tuple[Layout, torch.dtype, State, Rows]:
        """Call it in each layout, with flags of each kind, and look where the state counts its rows."""
        errors: dict[str, str] = {}
        for tried in get_args(Layout) if layout is None else (layout,):
            for flag in (torch.bool, torch.float32) if self.told_of_starts else (torch.bool,):
                try:
                    two, three = (self._state_of(rows, tried, flag) for rows in (2, 3))
                    return tried, flag, two, Rows.learn(two, three)
                except Exception as error:
                    told = " ".join(str(error).split())
                    errors[f"{SHAPES[tried]}"] = f"{type(error).__name__}: {told[:160]}"
        self._refuse(errors)
        raise AssertionError("refused")

    def _state_of(self, rows: int, layout: Layout, flag: torch.dtype) -> State:
        """Call it with some rows, and return its state; what it says must fit the layout."""
        self._flag, steps = flag, 3
        size = {"time first": (steps, rows), "batch first": (rows, steps), "step": (rows,)}[layout]
        seen, weight = self.imagine(size, torch.Generator().manual_seed(0)), self._weight()
        seen = seen.to(weight) if seen.is_floating_point() else seen
        with torch.no_grad():
            entry = None if self._given is None else self._given(self.module, rows)
            said, state = self._give(seen, entry, torch.zeros(size).bool())
        if any(leaf.shape[: len(size)] != size for leaf in said.values()) or not leaves(state):
            raise ContractError(f"x {list(seen.shape)} gave y {[list(leaf.shape) for leaf in said.values()]}")
        # A parameter's expanded view, as a learnt first state, is not to be kept.
        return pytree.tree_map_only(Tensor, torch.clone, state if self._given is None else entry)

    def _refuse(self, errors: dict[str, str]) -> None:
        """Say why no way of calling it works; once, if it is the same everywhere."""
        name, reasons = type(self.module).__name__, list(dict.fromkeys(errors.values()))
        third = ", with None for its first state and `first` third" if self.told_of_starts else ""
        if len(reasons) == 1:
            raise ContractError(f"{name} cannot be called as (x, state) -> (y, state){third}: {reasons[0]}.")
        told = "; ".join(f"x {shape}: {reason}" for shape, reason in errors.items())
        raise ContractError(
            f"{name} is not called like (x, state) -> (y, state){third}: {told}. Say what it sees with obs=, "
            "or how its state begins: holdfast.subjects.Bare(module, initial=lambda module, rows: ...)."
        )

    def _weight(self) -> Tensor:
        return next((leaf for leaf in self.module.parameters() if leaf.is_floating_point()), torch.zeros(1))


def _tried(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).cpu().float()
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ContractError(f"{type(module).__name__} cannot be copied to the CPU: {told}") from error


def _takes_first(module: nn.Module) -> bool:
    """Whether it must be given a third thing."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    asked = inspect.signature(module.forward).parameters.values()
    named = [each for each in asked if each.kind in kinds]
    return len(named) > 2 and named[2].default is inspect.Parameter.empty
