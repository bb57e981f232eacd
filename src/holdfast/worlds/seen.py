"""What is seen: one tensor, or a tree of them where a world shows several things at once."""

from functools import partial
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Shaped, Tensor

Seen = Shaped[Tensor, "..."] | TensorDictBase
"""An observation: a tensor, or for Dict and Tuple spaces a TensorDict, nested as they are.

The parts of a Dict go by their names, those of a Tuple by their numbers: `obs["image"]`, `obs["0"]`.
"""


PLAIN = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces that are one tensor."""


def parts_of(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]]:
    """List the parts of a Dict or Tuple by their names in a TensorDict, in a fixed order; else none."""
    if isinstance(space, spaces.Dict):
        return {str(key): space.spaces[key] for key in sorted(space.spaces, key=str)}
    if isinstance(space, spaces.Tuple):
        return {str(number): part for number, part in enumerate(space.spaces)}
    return {}


def device_of(obs: Seen) -> torch.device:
    """Say where an observation lies; a TensorDict by itself need not know."""
    leaf = obs if isinstance(obs, Tensor) else next(iter(obs.values(True, True)))
    return cast("Tensor", leaf).device


def blank(space: spaces.Space[Any]) -> Seen:
    """Make no observation at all of a space: no rows, with the leaves, shapes and kinds of numbers of one."""
    parts = parts_of(space)
    if parts:
        return TensorDict({name: blank(part) for name, part in parts.items()}, batch_size=[0])
    if not isinstance(space, PLAIN):
        raise ContractError(
            f"{space} cannot be stored; a world shows {', '.join(kind.__name__ for kind in PLAIN)}."
        )
    return torch.from_numpy(np.zeros((0, *(space.shape or ())), space.dtype))


def nothing_seen(space: spaces.Space[Any], rows: int) -> Seen:
    """Make observations that show nothing: zeros, or where choices count from more, the first choice."""
    parts = parts_of(space)
    if parts:
        leaves = {name: nothing_seen(part, rows) for name, part in parts.items()}
        return TensorDict(leaves, batch_size=[rows])
    empty = blank(space)
    start = space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0
    fill = torch.as_tensor(np.asarray(start)).to(empty.dtype)
    return fill.expand(rows, *empty.shape[1:]).clone()


def check_seen(obs: Seen, told: Seen, name: str = "observations") -> None:
    """Refuse observations that are not what the spec says; fractions may have any precision."""
    if isinstance(told, Tensor) and isinstance(obs, Tensor):
        if obs.shape[1:] != told.shape[1:] or obs.is_floating_point() != told.is_floating_point():
            raise ContractError(
                f"The world's spec says {name} are {list(told.shape[1:])} {told.dtype}; "
                f"those of reset() are {list(obs.shape[1:])} {obs.dtype}."
            )
        return
    there, wanted = (set(each.keys()) if isinstance(each, TensorDictBase) else None for each in (obs, told))
    if there is None or wanted is None or there != wanted:
        tells = [
            f"a TensorDict of {', '.join(sorted(each))}" if each else "a tensor" for each in (wanted, there)
        ]
        raise ContractError(f"The world's spec says {name} are {tells[0]}; those of reset() are {tells[1]}.")
    for key in sorted(wanted):
        check_seen(obs[key], told[key], f"{name}[{key!r}]")


def choose(where: Bool[Tensor, "*batch"], yes: Seen, no: Seen) -> Seen:
    """Take `yes` where a mask over the batch is true and `no` elsewhere, leaf by leaf."""
    if isinstance(no, Tensor):
        return _chosen(where, no, cast("Tensor", yes))
    return cast("TensorDictBase", no.apply(partial(_chosen, where), yes))


def still(obs: Seen, valid: Bool[Tensor, "*batch"], nothing: Seen | None) -> Seen:
    """Show nothing where nobody acts: fractions there may be anything, NaN too, and choices may not exist.

    `nothing` is an observation `[1,...]` of nothing; None: zeros.
    """
    if isinstance(obs, Tensor):
        return _stilled(valid, obs, nothing if isinstance(nothing, Tensor) else None)
    leaves = {
        key: still(
            cast("Seen", leaf), valid, None if nothing is None else cast("TensorDictBase", nothing)[key]
        )
        for key, leaf in obs.items()
    }
    return TensorDict(leaves, batch_size=obs.batch_size)


def _chosen(where: Tensor, no: Tensor, yes: Tensor) -> Tensor:
    return torch.where(_over(where, no), yes, no)


def _stilled(valid: Tensor, leaf: Tensor, nothing: Tensor | None) -> Tensor:
    if leaf.is_floating_point():
        return torch.where(_over(valid, leaf), leaf, 0.0)
    if leaf.dtype in (torch.uint8, torch.bool):
        # Every byte is one that can be seen.
        return leaf
    fill = torch.zeros((), dtype=leaf.dtype) if nothing is None else nothing[0]
    return torch.where(_over(valid, leaf), leaf, fill.to(leaf.device, non_blocking=True))


def _over(mask: Tensor, leaf: Tensor) -> Tensor:
    """Lay a mask over the batch along the axes of a leaf."""
    return mask.reshape(*mask.shape, *[1] * (leaf.dim() - mask.dim()))


def check_observation(space: spaces.Space[Any] | None, shape: tuple[int, ...], tokens: bool) -> None:
    """Refuse an observation space that says something else than the rest of a world's spec."""
    if space is None:
        return
    if tokens:
        raise ContractError(
            f"The world has features, so it shows tokens, and observation={space}; leave out one of them."
        )
    there = () if isinstance(space, spaces.Dict | spaces.Tuple) else space.shape
    if there is not None and tuple(there) != tuple(shape):
        raise ContractError(
            f"obs_shape is {tuple(shape)}, but observation={space} has the shape {tuple(there)}; "
            f"write obs_shape={tuple(there)}."
        )


def check_action_space(space: spaces.Space[Any] | None, names: tuple[str, ...]) -> None:
    """Refuse an action space that no policy could act in."""
    if space is None:
        if not names:
            raise ContractError(
                "The world has no actions; name them by action_names, or give action=MultiDiscrete or Box."
            )
        return
    if isinstance(space, spaces.Discrete):
        raise ContractError(f"action={space}: discrete actions go by action_names, one name an action.")
    if not isinstance(space, spaces.MultiDiscrete | spaces.Box):
        raise ContractError(f"action={space}: an action space is MultiDiscrete or Box.")
    if len(space.shape) != 1 or not space.shape[0]:
        raise ContractError(
            f"action={space} has the shape {space.shape}; write it flat, as a vector with at least one entry."
        )
    if isinstance(space, spaces.MultiDiscrete) and bool((space.start != 0).any()):
        raise ContractError(f"action={space}: actions count from 0; leave out start and add it in the world.")
    if isinstance(space, spaces.Box) and space.dtype.kind != "f":
        raise ContractError(
            f"action={space}: a Box of actions holds fractions; whole numbers: MultiDiscrete."
        )
    if names and len(names) != space.shape[0]:
        raise ContractError(
            f"There are {len(names)} action_names for the {space.shape[0]} entries of action={space}; name "
            "every entry, or none."
        )
