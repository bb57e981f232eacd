"""A bare module `(x, state) -> (y, state)` under test: the check is its trainer, and clears for it."""

import copy
import inspect
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

from holdfast.check.script import Moments
from holdfast.check.subject import Answer, Subject
from holdfast.check.subjects.sight import Sight, imagine
from holdfast.check.tree import Rows, State, leaves, rebuilt
from holdfast.errors import ConfigError
from holdfast.shapes import Tensor

Layout = Literal["step", "time first", "batch first"]
"""What `x` is: `[B,D]`, `[T,B,D]` or `[B,T,D]`."""


class Bare(Subject):
    """A module called `y, state = module(x, state)`, or `module(x, state, first)` if it takes three things.

    One that takes two things cannot be told where episodes start: the check clears the state before
    each call, and cuts segments where episodes start. What is proven is that its calls over segments
    give what its single steps give, and that it keeps nothing for itself.
    """

    def __init__(
        self,
        module: nn.Module,
        obs: Sight = None,
        layout: Layout | None = None,
        initial: Callable[[nn.Module, int], State] | None = None,
    ) -> None:
        self._draw, self._given = imagine(obs, module), initial
        self.takes_first = _takes_first(module)
        # Tried on a copy that any machine can run; the copy is then let go.
        self.module = _tried(module)
        self.layout: Layout = layout or self._find_layout()
        with torch.no_grad():
            two, three = (self._given(self.module, n) if self._given else self._state_of(n) for n in (2, 3))
        self._two_rows = two
        self._rows = Rows.learn(two, three)
        self.module = module

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

    def _state_of(self, rows: int) -> State:
        with torch.no_grad():
            return self._call(self._some_sight(rows), None, torch.zeros(rows).bool(), self.layout)[1]

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Clear, if it cannot itself, and call it with one step."""
        state = state if self.takes_first else self._cleared(state, moment.first)
        y, state = self._call(moment.obs, state, moment.first, self.layout)
        return {"y": y}, state

    def replay(self, moments: Moments, state: State) -> Answer:
        """Call it with the whole segment, or with the pieces between starts if it cannot clear itself."""
        T = moments.batch[1]
        if self.layout == "step":
            said = []
            for t in range(T):
                answer, state = self.act(moments[:, t], state)
                said.append(answer["y"])
            return {"y": torch.stack(said, dim=1)}
        edges = [0, T]
        if not self.takes_first:
            edges = sorted({0, T, *moments.first.any(0).nonzero().flatten().tolist()})
        pieces = []
        for start, stop in pairwise(edges):
            piece = moments[:, start:stop]
            state = state if self.takes_first else self._cleared(state, piece.first[:, 0])
            y, state = self._call_segment(piece, state)
            pieces.append(y)
        return {"y": torch.cat(pieces, dim=1)}

    def _cleared(self, state: State, first: Tensor) -> State:
        return self._rows.choose(first, self.initial(len(first)), state)

    def _call_segment(self, moments: Moments, state: State) -> tuple[Tensor, State]:
        turn = self.layout == "time first"
        x, first = (each.transpose(0, 1) if turn else each for each in (moments.obs, moments.first))
        y, state = self._two(self._give(x, state, first))
        return y.transpose(0, 1) if turn else y, state

    def _call(self, x: Tensor, state: State, first: Tensor, layout: Layout) -> tuple[Tensor, State]:
        """Call it with one step, in the layout it reads."""
        if layout == "step":
            return self._two(self._give(x, state, first))
        axis = 0 if layout == "time first" else 1
        y, state = self._two(self._give(x.unsqueeze(axis), state, first.unsqueeze(axis)))
        return y.squeeze(axis), state

    def _give(self, x: Tensor, state: State, first: Tensor) -> Any:
        return self.module(x, state, first) if self.takes_first else self.module(x, state)

    def _some_sight(self, *size: int) -> Tensor:
        seen, weight = self.imagine(size, torch.Generator().manual_seed(0)), self._weight()
        return seen.to(weight) if seen.is_floating_point() else seen.to(weight.device)

    def _find_layout(self) -> Layout:
        """Call it in each layout and look where the state counts its rows."""
        errors = []
        for layout in ("time first", "batch first", "step"):
            try:
                if self._fits(layout):
                    return layout
            except Exception as error:
                errors.append(f"{layout}: {type(error).__name__}: {' '.join(str(error).split())[:120]}")
        raise ConfigError(
            f"{type(self.module).__name__} is not called like (x, state) -> (y, state): "
            f"{'; '.join(errors) or 'no layout fits'}. "
            "Say what it sees with obs=, how with layout=, or how its state begins with initial=."
        )

    def _fits(self, layout: Layout) -> bool:
        rows, steps = 3, 5
        with torch.no_grad():
            if layout == "step":
                y, state = self._call(
                    self._some_sight(rows), self._seed(rows), torch.ones(rows).bool(), layout
                )
                return len(y) == rows and all(rows in leaf.shape for leaf in leaves(state))
            size = (steps, rows) if layout == "time first" else (rows, steps)
            y, state = self._two(
                self._give(self._some_sight(*size), self._seed(rows), torch.zeros(size).bool())
            )
        counted = all(rows in leaf.shape and steps not in leaf.shape for leaf in leaves(state))
        return y.shape[:2] == size and counted and bool(leaves(state))

    def _seed(self, rows: int) -> State:
        return None if self._given is None else self._given(self.module, rows)

    def _weight(self) -> Tensor:
        return next((leaf for leaf in self.module.parameters() if leaf.is_floating_point()), torch.zeros(1))

    def _two(self, result: Any) -> tuple[Tensor, State]:
        """Take apart what came out; PyTorch's cells give their state only, and say its first tensor."""
        if isinstance(self.module, nn.RNNCellBase):
            return (result, result) if isinstance(result, Tensor) else (result[0], result)
        y, state = result
        return y, state


def _tried(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).cpu().float()
    except Exception as error:
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise ConfigError(f"{type(module).__name__} cannot be copied to the CPU: {told}") from error


def _takes_first(module: nn.Module) -> bool:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [each for each in inspect.signature(module.forward).parameters.values() if each.kind in kinds]
    return len(named) > 2
