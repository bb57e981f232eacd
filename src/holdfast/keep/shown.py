"""What a caller shows: NumPy or torch, checked against what the policy's world shows."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ContractError
from holdfast.shapes import Bool, Tensor
from holdfast.worlds.seen import Seen, blank, choices_outside, leaves_of, parts_of

WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def as_seen(obs: Any, space: spaces.Space[Any], agents: int, device: torch.device) -> Seen:
    """Turn what was shown into tensors of the kinds a space has; what does not fit is an error."""
    seen = _read(obs, space, agents, device, "obs")
    outside = choices_outside(seen, space)
    if bool(outside.any()):
        bad = outside.nonzero().flatten().tolist()
        raise ContractError(f"obs shows agents {bad} a choice that there is not; there is {space}.")
    return seen


def require_numbers(obs: Seen, valid: Bool[Tensor, " A"] | None) -> None:
    """Refuse a NaN or an Inf where somebody acts: it would stay in the memory for the whole episode."""
    for leaf in leaves_of(obs):
        bad = ~leaf.reshape(len(leaf), -1).isfinite().all(1)
        bad = bad if valid is None else bad & valid
        if bool(bad.any()):
            agents = bad.nonzero().flatten().tolist()
            raise ContractError(f"obs of agents {agents} is not finite; show numbers: no NaN, no Inf.")


def as_flags(flags: Any, name: str, agents: int, device: torch.device) -> Bool[Tensor, " A"]:
    """Turn one flag an agent into a tensor."""
    if isinstance(flags, Tensor):
        told = flags
    else:
        array = np.asarray(flags)
        told = torch.from_numpy(array.copy()) if array.dtype == np.bool_ else None
    if told is None or told.dtype != torch.bool or told.shape != (agents,):
        is_now = f"{list(told.shape)} {told.dtype}" if told is not None else repr(flags)
        raise ContractError(f"{name} is {is_now}; must be one True or False for each of {agents} agents.")
    return told.to(device)


def first_leaf(obs: Any) -> Any:
    """Take the first array or tensor of an observation: the answer comes as it came."""
    while isinstance(obs, Mapping | TensorDictBase | tuple | list) and len(obs):
        obs = obs[0] if isinstance(obs, tuple | list) else next(iter(obs.values()))
    return obs


def _read(obs: Any, space: spaces.Space[Any], agents: int, device: torch.device, name: str) -> Seen:
    parts = parts_of(space)
    if not parts:
        return _read_leaf(obs, blank(space), agents, device, name)
    if isinstance(obs, tuple | list):
        obs = {str(number): part for number, part in enumerate(obs)}
    there = sorted(map(str, obs.keys())) if isinstance(obs, Mapping | TensorDictBase) else None
    if there != sorted(parts):
        is_now = type(obs).__name__ if there is None else ", ".join(there) or "empty"
        raise ContractError(f"{name} is {is_now}; must have the parts {', '.join(sorted(parts))}.")
    named = {str(key): part for key, part in obs.items()}
    leaves = {key: _read(named[key], part, agents, device, f"{name}[{key!r}]") for key, part in parts.items()}
    return TensorDict(leaves, batch_size=[agents])


def _read_leaf(obs: Any, wanted: Any, agents: int, device: torch.device, name: str) -> Tensor:
    shape = [agents, *wanted.shape[1:]]
    must = f"must be {shape} {str(wanted.dtype).removeprefix('torch.')}, a row for each of {agents} agents"
    if isinstance(obs, Tensor):
        leaf = obs
    else:
        array = np.asarray(obs)
        if array.dtype.kind not in "fiub":
            raise ContractError(f"{name} is {type(obs).__name__} of {array.dtype}; {must}.")
        # A copy: the caller's array may be overwritten, or not be writable, which torch warns of.
        leaf = torch.from_numpy(array.copy())
    if list(leaf.shape) != shape or not _fits(leaf.dtype, wanted.dtype):
        raise ContractError(f"{name} is {list(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}; {must}.")
    return leaf.to(device, wanted.dtype)


def _fits(came: torch.dtype, wanted: torch.dtype) -> bool:
    """Say whether numbers may be read as another kind: fractions are no choices, and bytes are bytes."""
    if wanted.is_floating_point:
        return came.is_floating_point or came in WHOLE
    return came == wanted if wanted == torch.uint8 else came in WHOLE
