"""Observations and actions: the tensors of a space, masks over their rows, and checks of shapes and dtypes."""

from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ContractError
from holdfast.types import Bool, Tensor
from holdfast.worlds.step import Obs, Step, WorldSpec

PLAIN = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces that are one tensor."""


def subspaces(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]]:
    """Return the subspaces of a Dict or Tuple by their keys in a TensorDict, sorted; empty for others."""
    if isinstance(space, spaces.Dict):
        return {str(key): space.spaces[key] for key in sorted(space.spaces, key=str)}
    if isinstance(space, spaces.Tuple):
        return {str(number): part for number, part in enumerate(space.spaces)}
    return {}


def device_of(obs: Obs) -> torch.device:
    """Return the device of an observation; the `device` of a TensorDict may be unset."""
    return tensors_of(obs)[0].device


def tensors_of(obs: Obs) -> list[Tensor]:
    """Return the tensors of an observation."""
    return [obs] if isinstance(obs, Tensor) else cast("list[Tensor]", list(obs.values(True, True)))


def space_bounds(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and greatest values of a Box or discrete space."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        count = space.n if isinstance(space, spaces.Discrete) else space.nvec
        return np.asarray(space.start), np.asarray(space.start + count - 1)
    if isinstance(space, spaces.MultiBinary):
        return np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8)
    raise ContractError(f"{space} has no least and greatest values; Box and discrete spaces have.")


def has_discrete(space: spaces.Space[Any]) -> bool:
    """Return whether a space has a Discrete or MultiDiscrete part."""
    parts = subspaces(space)
    if parts:
        return any(map(has_discrete, parts.values()))
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete)


def out_of_range(obs: Obs, space: spaces.Space[Any]) -> Bool[Tensor, " A"]:
    """Return the rows outside of a Discrete or MultiDiscrete space; other values may be anything."""
    parts = subspaces(space)
    if parts:
        td = cast("TensorDictBase", obs)
        return torch.stack([out_of_range(td[name], part) for name, part in parts.items()]).any(0)
    leaf = cast("Tensor", obs)
    if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return torch.zeros(len(leaf), dtype=torch.bool, device=leaf.device)
    low, high = (torch.as_tensor(bound).to(leaf.device, non_blocking=True) for bound in space_bounds(space))
    return ((leaf < low) | (leaf > high)).reshape(len(leaf), -1).any(1)


FAR = 0.1
"""Part of the width of a Box; observations may leave it by that much, by rounding for example."""


def far_outside(obs: Obs, space: spaces.Space[Any], rows: int) -> Bool[Tensor, " rows"]:
    """Return which of `rows` rows have a value far outside of a Box."""
    parts = subspaces(space)
    if parts:
        td = cast("TensorDictBase", obs)
        return torch.stack([far_outside(td[name], part, rows) for name, part in parts.items()]).any(0)
    leaf = cast("Tensor", obs)
    if not isinstance(space, spaces.Box) or not has_bounds(space):
        return torch.zeros(rows, dtype=torch.bool, device=leaf.device)
    low, high = (torch.as_tensor(bound, dtype=torch.float32, device=leaf.device) for bound in (space.low, space.high))
    margin = torch.where((high - low).isfinite(), FAR * (high - low), 1.0)
    return ((leaf < low - margin) | (leaf > high + margin)).reshape(rows, -1).any(1)


def has_bounds(space: spaces.Space[Any]) -> bool:
    """Return whether observations can be outside of a Box of the space; bytes of 0 to 255 cannot."""
    parts = subspaces(space)
    if parts:
        return any(map(has_bounds, parts.values()))
    return isinstance(space, spaces.Box) and not _covers_dtype(space)


def _covers_dtype(space: spaces.Box) -> bool:
    """Whether every value of the dtype is in a Box, as for bytes from 0 to 255."""
    dtype = np.dtype(space.dtype)
    if dtype.kind not in "iu":
        return dtype.kind == "b" or not (np.isfinite(space.low).any() or np.isfinite(space.high).any())
    limits = np.iinfo(dtype.name)
    return bool((space.low == limits.min).all() and (space.high == limits.max).all())


def empty_obs(space: spaces.Space[Any]) -> Obs:
    """Return an empty batch `[0, ...]` with the structure and dtypes of a space."""
    return zero_obs(space, rows=0)


def zero_obs(space: spaces.Space[Any], rows: int) -> Obs:
    """Return observations of zeros, or of the first choice of a discrete space with a start."""
    parts = subspaces(space)
    if parts:
        return TensorDict({name: zero_obs(part, rows) for name, part in parts.items()}, batch_size=[rows])
    if not isinstance(space, PLAIN):
        names = ", ".join(kind.__name__ for kind in PLAIN)
        raise ContractError(f"{space} cannot be stored; observation spaces are {names}.")
    start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
    return torch.from_numpy(np.full((rows, *(space.shape or ())), start, space.dtype))


def where_obs(where: Bool[Tensor, "*batch"], yes: Obs, no: Obs) -> Obs:
    """Return `yes` where a mask over the batch is true and `no` elsewhere, leaf by leaf."""

    def choose(no: Tensor, yes: Tensor) -> Tensor:
        return torch.where(_expand(where, no), yes, no)

    if isinstance(no, Tensor):
        return choose(no, cast("Tensor", yes))
    return cast("TensorDictBase", no.apply(choose, yes))


def mask_invalid(obs: Obs, valid: Bool[Tensor, "*batch"], zeros: Obs | None) -> Obs:
    """Replace invalid rows, which may be NaN or outside of a discrete space.

    `zeros` is an observation `[1,...]` from `zero_obs`; None: plain zeros.
    """
    if isinstance(obs, Tensor):
        return _mask_leaf(valid, obs, zeros if isinstance(zeros, Tensor) else None)
    leaves = {
        key: mask_invalid(cast("Obs", leaf), valid, None if zeros is None else cast("TensorDictBase", zeros)[key])
        for key, leaf in obs.items()
    }
    return TensorDict(leaves, batch_size=obs.batch_size)


def _mask_leaf(valid: Tensor, leaf: Tensor, zeros: Tensor | None) -> Tensor:
    if leaf.is_floating_point():
        return torch.where(_expand(valid, leaf), leaf, 0.0)
    if leaf.dtype in (torch.uint8, torch.bool):
        # Every byte is a valid observation.
        return leaf
    fill = torch.zeros((), dtype=leaf.dtype) if zeros is None else zeros[0]
    return torch.where(_expand(valid, leaf), leaf, fill.to(leaf.device, non_blocking=True))


def _expand(mask: Tensor, leaf: Tensor) -> Tensor:
    """Add axes to a mask over the batch, up to those of a leaf."""
    return mask.reshape(*mask.shape, *[1] * (leaf.dim() - mask.dim()))


def check_actions(actions: Tensor, agents: int, space: int | spaces.MultiDiscrete | spaces.Box) -> None:
    """Raise on actions of the wrong shape or dtype, and on the CPU, where reading is free, of wrong value.

    `space` is the number of discrete actions, or the action space of the spec. Samples outside of a Box are
    allowed: adapters clip them.
    """
    shape = (agents,) if isinstance(space, int) else (agents, *space.shape)
    continuous = isinstance(space, spaces.Box)
    if actions.shape != shape or actions.is_floating_point() != continuous:
        what = (
            f"{agents} integers below {space}"
            if isinstance(space, int)
            else f"{'floats' if continuous else 'integers'} {shape} for {space}"
        )
        raise ContractError(
            f"actions are {tuple(actions.shape)} {actions.dtype}; this world has {agents} agents and needs {what}."
        )
    if actions.device.type != "cpu":
        return
    # By numpy, which is faster for a few numbers.
    numbers = actions.numpy()
    if isinstance(space, spaces.Box):
        bad, last = ~np.isfinite(numbers), None
    else:
        last = np.subtract(space if isinstance(space, int) else space.nvec, 1)
        bad = (numbers < 0) | (numbers > last)
    if np.count_nonzero(bad):
        agent = int(bad.nonzero()[0][0])
        rule = "must be finite" if last is None else f"there are actions 0 to {last.tolist()}"
        raise ContractError(f"agent {agent} took action {actions[agent].tolist()}; {rule}.")


FLAGS = ("terminated", "truncated", "first", "valid", "trial")


def flat_leaves(obs: Any, name: str) -> dict[str, Tensor]:
    """Return the tensors of an observation by their paths: `obs`, or `obs['image']` and so on."""
    if isinstance(obs, Tensor):
        return {name: obs}
    leaves: dict[str, Tensor] = {}
    for key in sorted(obs.keys()) if isinstance(obs, TensorDictBase) else []:
        leaves |= flat_leaves(obs[key], f"{name}[{key!r}]")
    return leaves


class StepSchema:
    """Shapes and dtypes of the steps of a world, by its spec."""

    def __init__(self, spec: WorldSpec, agents: int) -> None:
        self.spec, self.agents = spec, agents
        self._leaves = flat_leaves(empty_obs(spec.observation_space), "")

    def find_error(self, step: Any) -> tuple[str, bool]:
        """Return the first error of a step, empty if none, and whether the rest can be read."""
        if not isinstance(step, Step):
            return f"the world returns {type(step).__name__}, must be holdfast.Step", False
        error, readable = self.find_obs_error(step.obs, "obs")
        if not readable:
            return error, False
        for name in ("reward", *FLAGS):
            value, expected = getattr(step, name), f"a tensor [{self.agents}]"
            if not isinstance(value, Tensor):
                return f"{name} is {type(value).__name__}, must be {expected}", False
            if value.shape != (self.agents,):
                return f"{name} is {list(value.shape)}, must be {expected}", False
            right = value.is_floating_point() if name == "reward" else value.dtype == torch.bool
            if not error and not right:
                error = f"{name} is {value.dtype}, must be {'a float' if name == 'reward' else 'torch.bool'}"
            if not error and value.device != device_of(step.obs):
                error = f"{name} is on {value.device}, must be where obs is, on {device_of(step.obs)}"
        return error, True

    def find_obs_error(self, obs: Any, name: str) -> tuple[str, bool]:
        """Return the first error of an observation, empty if none, and whether it can be read."""
        if isinstance(obs, TensorDictBase) and obs.batch_size != (self.agents,):
            return f"{name} has batch_size {list(obs.batch_size)}, must be [{self.agents}]", False
        expected = {f"{name}{path}": leaf for path, leaf in self._leaves.items()}
        leaves, error = flat_leaves(obs, name), ""
        if set(expected) != set(leaves):
            actual = ", ".join(sorted(leaves)) or type(obs).__name__
            return f"{name} is {actual}, must be {', '.join(sorted(expected))} as torch tensors", False
        for path, leaf in leaves.items():
            shape, dtype = [self.agents, *expected[path].shape[1:]], expected[path].dtype
            if list(leaf.shape) != shape:
                return f"{path} is {list(leaf.shape)}, must be {shape}", False
            # Tokens are bytes; elsewhere floats may have any precision, and integers any size.
            right = leaf.is_floating_point() == dtype.is_floating_point
            if not error and (leaf.dtype != dtype if self.spec.features else not right):
                error = f"{path} is {leaf.dtype}, must be {dtype}"
        return error, True
