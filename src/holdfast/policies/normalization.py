"""Running statistics of observations and returns, part of the policy's weights; they change between iterations only."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

from holdfast import ranks
from holdfast.cuda_graphs import constant
from holdfast.errors import ContractError
from holdfast.types import Bool, Float, Shaped, Tensor
from holdfast.worlds.obs import Obs, subspaces
from holdfast.worlds.step import WorldSpec

CLIP = 10.0
"""Normalized numbers are clipped to this many standard deviations."""
EPS = 1e-8
Path = tuple[str, ...]


class RunningStats(nn.Module):
    """Mean and variance of all numbers seen so far; 0 and 1 before the first. In double precision, saved as buffers."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.mean: Tensor
        self.var: Tensor
        self.count: Tensor
        self.register_load_state_dict_post_hook(_require_statistics)

    @property
    def std(self) -> Float[Tensor, "*shape"]:
        """The standard deviation, never 0."""
        return (self.var + EPS).sqrt()

    @torch.no_grad()
    def update(self, x: Shaped[Tensor, "*batch"], valid: Bool[Tensor, "..."]) -> None:
        """Add the valid entries of a batch, of all ranks (Chan et al. 1983)."""
        mask = valid.reshape(*valid.shape, *[1] * self.mean.dim())
        rows, axes = torch.where(mask, x, 0.0).double(), tuple(range(valid.dim()))
        count = ranks.reduce(valid.sum().double())
        # If there are none, all below is multiplied by 0.
        number = count.clamp(min=1)
        mean = ranks.reduce(rows.sum(axes)) / number
        var = ranks.reduce(torch.where(mask, rows - mean, 0.0).square().sum(axes)) / number
        total = (self.count + count).clamp(min=1)
        share, shift = count / total, mean - self.mean
        self.var.copy_((1 - share) * self.var + share * var + share * (1 - share) * shift.square())
        self.mean.add_(share * shift)
        self.count.add_(count)

    def normalize(self, x: Shaped[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return (x - mean) / std, clipped; of integers in float32."""
        x = x if x.is_floating_point() else x.float()
        mean, std = self._in(x.dtype)
        return ((x - mean) / std).clamp(-CLIP, CLIP)

    def denormalize(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Return x std + mean."""
        mean, std = self._in(x.dtype)
        return x * std + mean

    def _in(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation in a dtype."""
        return (
            constant(self.mean, dtype, lambda: self.mean.to(dtype)),
            constant(self.var, dtype, lambda: self.std.to(dtype)),
        )


def _require_statistics(stats: nn.Module, _: Any) -> None:
    """Raise for loaded statistics that no numbers have: they would make all that is normalized NaN."""
    assert isinstance(stats, RunningStats)
    # As they are used: in single precision.
    numbers = torch.cat([number.float().flatten() for number in (stats.mean, stats.std, stats.count)])
    if not bool(numbers.isfinite().all()) or bool((stats.var < 0).any()) or bool(stats.count < 0):
        raise ContractError("running statistics must be finite, and variance and count not negative")


class ObsNormalizer(nn.Module):
    """Normalizes the numeric leaves of observations: vectors, and floats with two axes. All others are left alone."""

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        leaves = dict(_numeric_leaves(space))
        self._index = {path: number for number, path in enumerate(leaves)}
        # A ModuleList, because a ModuleDict does not take every key.
        self.stats = nn.ModuleList(RunningStats(leaf.shape) for leaf in leaves.values())

    def forward(self, obs: Obs) -> Obs:
        """Return normalized observations `[*batch,...]`."""
        return self._normalize(obs, ())

    def _normalize(self, obs: Obs, path: Path) -> Obs:
        if not isinstance(obs, Tensor):
            leaves = {key: self._normalize(cast("Obs", leaf), (*path, str(key))) for key, leaf in obs.items()}
            return TensorDict(leaves, batch_size=obs.batch_size)
        return self._stats(path).normalize(obs) if path in self._index else obs

    def update(self, obs: Obs, valid: Bool[Tensor, "*batch"]) -> None:
        """Add the valid observations of a batch `[*batch,...]`."""
        for path in self._index:
            leaf = obs if isinstance(obs, Tensor) else obs[path]
            self._stats(path).update(cast("Tensor", leaf), valid)

    def _stats(self, path: Path) -> RunningStats:
        return cast("RunningStats", self.stats[self._index[path]])


def _numeric_leaves(space: spaces.Space[Any], path: Path = ()) -> Iterator[tuple[Path, spaces.Box]]:
    """Yield the paths and spaces of the leaves to normalize: integers with two axes are a grey image."""
    for key, part in subspaces(space).items():
        yield from _numeric_leaves(part, (*path, key))
    if isinstance(space, spaces.Box) and len(space.shape) < (3 if np.dtype(space.dtype).kind == "f" else 2):
        yield path, space


def normalized_spec(spec: WorldSpec) -> WorldSpec:
    """Return the spec of normalized observations: what is normalized has no bounds."""
    if spec.features:
        return spec
    return replace(spec, observation=_without_bounds(spec.observation_space))


def _without_bounds(space: spaces.Space[Any]) -> spaces.Space[Any]:
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: _without_bounds(part) for key, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_without_bounds(part) for part in space.spaces])
    leaf = dict(_numeric_leaves(space)).get(())
    return space if leaf is None else spaces.Box(-np.inf, np.inf, leaf.shape, np.float32)
