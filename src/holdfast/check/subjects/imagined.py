"""What a world could show, imagined: drawn as one tensor, and shown as the tree it stands for."""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast.check.subjects.sight import spread
from holdfast.errors import ContractError
from holdfast.shapes import Shaped, Tensor
from holdfast.worlds import WorldSpec
from holdfast.worlds.seen import Seen, parts_of

Path = tuple[str, ...]
LARGEST = 1 << 20
"""How far whole numbers are drawn where there are more: single precision holds them exactly."""


class Sights:
    """Draws observations that fit a world.

    Scripts cut, mix and change observations as tensors. Of a Dict or Tuple they hold all leaves laid
    side by side, `[*size, numbers]`; `show` makes of them what the policy sees.
    """

    def __init__(self, spec: WorldSpec) -> None:
        self.spec, self.leaves = spec, _leaves(spec.sight, ())
        self.is_tree = bool(parts_of(spec.sight))

    def draw(self, size: tuple[int, ...], generator: torch.Generator) -> Shaped[Tensor, "..."]:
        """Draw observations `[*size,...]`."""
        if self.spec.features:
            return _tokens(self.spec, size, generator)
        drawn = [_draw(space, size, generator) for space in self.leaves.values()]
        if not self.is_tree:
            return drawn[0]
        fractions = any(leaf.is_floating_point() for leaf in drawn)
        kind = torch.float32 if fractions else torch.int64
        return torch.cat([leaf.reshape(*size, -1).to(kind) for leaf in drawn], dim=-1)

    def show(self, drawn: Shaped[Tensor, "..."]) -> Seen:
        """Make of what was drawn what a policy sees."""
        if not self.is_tree:
            return drawn
        batch = drawn.shape[:-1]
        sizes = [math.prod(space.shape or ()) for space in self.leaves.values()]
        shown = TensorDict({}, batch_size=batch)
        for (path, space), leaf in zip(self.leaves.items(), drawn.split(sizes, -1), strict=True):
            whole = _whole(space)
            leaf = leaf if whole is None else leaf.round().to(whole)
            shown[path] = leaf.reshape(*batch, *(space.shape or ()))
        return shown


def _leaves(space: spaces.Space[Any], path: Path) -> dict[Path, spaces.Space[Any]]:
    """List what a tree of spaces consists of, in a fixed order, by the way to it."""
    parts = parts_of(space)
    if not parts:
        return {path: space}
    found: dict[Path, spaces.Space[Any]] = {}
    for name, part in parts.items():
        found |= _leaves(part, (*path, name))
    return found


def _whole(space: spaces.Space[Any]) -> torch.dtype | None:
    """Say what whole numbers a space holds, or None if it holds fractions."""
    if isinstance(space, spaces.Box) and space.dtype.kind == "f":
        return None
    return torch.uint8 if space.dtype == np.uint8 else torch.int64


def _draw(space: spaces.Space[Any], size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from a space that has no parts."""
    whole = _whole(space)
    if isinstance(space, spaces.Box) and whole is None:
        return spread(space)(torch.randn(*size, *space.shape, generator=generator))
    low, high = _walls(space)
    count = torch.tensor(np.minimum(high - low + 1, LARGEST))
    share = torch.rand(*size, *count.shape, generator=generator, dtype=torch.float64)
    return (torch.tensor(low) + (share * count).floor()).to(whole)


def _walls(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Say between which whole numbers a space lies."""
    if isinstance(space, spaces.Discrete):
        return np.array(float(space.start)), np.array(float(space.start + space.n - 1))
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.astype(float), (space.start + space.nvec - 1).astype(float)
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape), np.ones(space.shape)
    if isinstance(space, spaces.Box):
        return space.low.astype(float), space.high.astype(float)
    raise ContractError(
        f"The check cannot imagine {space}; it can Box, Discrete, MultiDiscrete, MultiBinary, Dict and Tuple."
    )


def _tokens(spec: WorldSpec, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    shape = (*size, spec.obs_shape[0])
    rows, columns = (torch.randint(side, shape, generator=generator) for side in spec.window)
    feature = torch.randint(len(spec.features), shape, generator=generator)
    norm = torch.tensor([feature.normalization for feature in spec.features])
    share = 0.25 + 0.75 * torch.rand(shape, generator=generator)
    value = (norm[feature] * share).ceil().clamp(max=255)
    return torch.stack([rows << 4 | columns, feature, value.long()], dim=-1).to(torch.uint8)
