"""Adapter of policies given as three functions, and the observations and outputs of any policy."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch import nn
from torch.utils import _pytree as pytree

from holdfast.check.adapters.base import Outputs, PolicyAdapter
from holdfast.check.compare import State, register_dataclasses
from holdfast.check.script import Draw, StepBatch
from holdfast.errors import ConfigError
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
    width = first_width(module)
    if width is None:
        raise ConfigError(
            f"The observation shape of {type(module).__name__} is unknown; give it: check(policy, obs=(4,)), a "
            "Gymnasium space, or --obs 3,84,84 on the command line."
        )
    return width


def first_width(module: nn.Module) -> int | None:
    """Return how many numbers the first layer reads; None if it reads no vector."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.in_features:
            return layer.in_features
        if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            return layer.input_size
        if isinstance(layer, nn.BatchNorm1d):
            return layer.num_features
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
            return layer.normalized_shape[0]
        if not list(layer.children()) and list(layer.parameters()):
            break
    return None


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
        return register_dataclasses(self._initial(self.module, rows))

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call the given function."""
        outputs, state = self._act(self.module, step.obs, state, *self._flags(step))
        return _output_dict(outputs), register_dataclasses(state)

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
    return dict(outputs) if isinstance(outputs, Mapping) else named_outputs("output", outputs)


def named_outputs(name: str, outputs: Any) -> Outputs:
    """Name outputs by their path in tuples, lists and dictionaries."""
    leaves, _ = pytree.tree_flatten_with_path(outputs)
    return {f"{name}{pytree.keystr(path)}": leaf for path, leaf in leaves}
