"""What a foreign policy sees: found in its weights, or told by its owner."""

from collections.abc import Callable
from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from holdfast.check.script import Imagine
from holdfast.errors import ConfigError
from holdfast.shapes import Tensor

Sight = int | tuple[int, ...] | spaces.Space[Any] | None
"""What somebody may say of observations: a width, a shape, a Gymnasium space, or nothing."""


def imagine(sight: Sight, module: nn.Module) -> Imagine:
    """Make a function that draws observations of the kind a policy sees.

    Nothing said means a vector, as wide as the policy's first layer reads.
    """
    if isinstance(sight, spaces.Discrete):
        return _whole_numbers(int(sight.n), int(sight.start))
    if isinstance(sight, spaces.Box):
        return _fractions(sight.shape, spread(sight))
    if isinstance(sight, spaces.Space):
        raise ConfigError(
            f"obs={sight}: the check draws Box and Discrete observations; for others give a Subject of your "
            "own with `imagine`."
        )
    if sight is None:
        return _fractions((_width(module),))
    return _fractions((sight,) if isinstance(sight, int) else tuple(sight))


def _fractions(shape: tuple[int, ...], scale: Callable[[Tensor], Tensor] | None = None) -> Imagine:
    def draw(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        drawn = torch.randn(*size, *shape, generator=generator)
        return drawn if scale is None else scale(drawn)

    return draw


def _whole_numbers(count: int, start: int) -> Imagine:
    def draw(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return start + torch.randint(count, size, generator=generator)

    return draw


def spread(box: spaces.Box) -> Callable[[Tensor], Tensor]:
    """Spread normal numbers over a box, where it has walls."""
    low, high = (torch.as_tensor(side).float() for side in (box.low, box.high))
    bounded = low.isfinite() & high.isfinite()
    span = torch.where(bounded, high - low, 0.0)
    return lambda drawn: torch.where(bounded, low + span * torch.sigmoid(drawn), drawn.clamp(low, high))


def _width(module: nn.Module) -> int:
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and layer.in_features:
            return layer.in_features
        if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
            return layer.input_size
        if not list(layer.children()) and list(layer.parameters()):
            break
    raise ConfigError(
        f"{type(module).__name__} does not show what it sees; say it: check(policy, obs=(4,)), a Gymnasium "
        "space, or --obs 3,84,84 on the command line."
    )
