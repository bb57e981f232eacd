"""Anybody's policy under test, by three functions its owner gives."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from holdfast.check.script import Moments
from holdfast.check.subject import Answer, Subject
from holdfast.check.subjects.sight import Sight, imagine
from holdfast.check.tree import State
from holdfast.shapes import Tensor


class Callables(Subject):
    """A policy given as three functions, each of which gets the module first, so that the check can copy it.

    `initial(module, rows) -> state`, `act(module, obs, state, first) -> outputs, state` and
    `replay(module, obs, actions, state, first) -> outputs`, with observations `[A,...]` and `[B,T,...]`.
    Outputs are a tensor, or several in a tuple or a dictionary; `first` is bool. With `ends=True` they
    get `terminated, truncated` in place of `first`, to test who clears on which. With `no_grad=False`
    `act` is called with gradients on, as by a trainer that backpropagates through its rollout; the
    state must then be cut.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        initial: Callable[[Any, int], State],
        act: Callable[..., tuple[Any, State]],
        replay: Callable[..., Any],
        value: Callable[..., Any] | None = None,
        obs: Sight = None,
        actions: int = 1,
        ends: bool = False,
        no_grad: bool = True,
        rollouts: int = 2,
        segments: int = 2,
    ) -> None:
        self.module, self.actions = module, actions
        self._initial, self._act, self._replay, self._value = initial, act, replay, value
        self._draw, self._ends, self.cuts_itself = imagine(obs, module), ends, not no_grad
        self.rollouts, self.segments = rollouts, segments

    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw what it was said to see."""
        return self._draw(size, generator)

    def initial(self, rows: int) -> State:
        """Ask the function given for it."""
        return self._initial(self.module, rows)

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Ask the function given for it."""
        said, state = self._act(self.module, moment.obs, state, *self._flags(moment))
        return _named(said), state

    def replay(self, moments: Moments, state: State) -> Answer:
        """Ask the function given for it."""
        return _named(self._replay(self.module, moments.obs, moments.action, state, *self._flags(moments)))

    def value(self, moment: Moments, state: State) -> Answer:
        """Ask the function given for it, or act and drop the state."""
        if self._value is None:
            return super().value(moment, state)
        return _named(self._value(self.module, moment.obs, state, *self._flags(moment)))

    def _flags(self, moments: Moments) -> tuple[Tensor, ...]:
        return (moments.terminated, moments.truncated) if self._ends else (moments.first,)


def _named(said: Any) -> Answer:
    """Name what was said by its way through tuples, lists and dictionaries."""
    if isinstance(said, Mapping):
        return dict(said)
    told, _ = pytree.tree_flatten_with_path(said)
    return {f"output{pytree.keystr(path)}": leaf for path, leaf in told}
