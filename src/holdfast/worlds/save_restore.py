"""Save and restore worlds; a Step as a state tree."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ContractError, HoldfastError, error_text
from holdfast.state_tree import get_field, get_tensor_like, mismatch
from holdfast.types import Tensor
from holdfast.worlds.obs import Obs, StepSchema, where_obs, zero_obs
from holdfast.worlds.step import Restarted, Restorable, Step, World, WorldSpec

PLAIN = (Tensor, np.ndarray, bool, int, float, str, type(None))
"""Types of the leaves of a state."""
MAX_ITEMSIZE = 8
"""Bytes of the largest number that PyTorch has."""
NOT_RESTORABLE = "the world cannot be restored: it has no state() and restore(state)"


def save_world(world: World) -> dict[str, Any] | None:
    """Return the state of a world, or None if it has none."""
    if not isinstance(world, Restorable):
        return None
    try:
        state = world.state()
    except HoldfastError:
        raise
    except Exception as error:
        raise ContractError(f"{_name(world)}: state() failed with {error_text(error)}.") from error
    if state is not None:
        _require_plain(state, f"{_name(world)}: state()")
    return state


def resume_world(world: World, state: Mapping[str, Any] | None, pending: Step) -> tuple[Step, Restarted | None]:
    """Restore a world, and return the step that needs actions next.

    That is `pending`, the last step before the state was saved. Rows of agents that could not be restored show their
    new episode instead: `first`, without reward or end.
    """
    error, _ = StepSchema(world.spec, world.agents).find_error(pending)
    if error:
        raise mismatch(f"in the pending step, {error}")
    restarted = restore_world(world, state)
    if restarted is None:
        return pending, None
    mask, step = restarted.mask, restarted.step
    merged = Step(
        obs=where_obs(mask, step.obs, pending.obs),
        reward=torch.where(mask, 0.0, pending.reward),
        terminated=pending.terminated & ~mask,
        truncated=pending.truncated & ~mask,
        first=pending.first | mask,
        valid=torch.where(mask, step.valid, pending.valid),
        trial=pending.trial & ~mask,
        last_obs=pending.last_obs,
    )
    return merged, restarted


def restore_world(world: World, state: Mapping[str, Any] | None) -> Restarted | None:
    """Restore a world, or reset it if there is no state; return the agents that restarted, if any."""
    if state is None:
        step = world.reset()
        return Restarted(torch.ones_like(step.first), step, NOT_RESTORABLE)
    if not isinstance(world, Restorable):
        raise mismatch(f"it has a state, but {_name(world)} has no state() and restore(state)")
    try:
        restarted = world.restore(state)
    except HoldfastError:
        raise
    except Exception as error:
        raise mismatch(f"restore() of {_name(world)} failed with {error_text(error)}") from error
    if restarted is None:
        return None
    if not isinstance(restarted, Restarted):
        raise ContractError(f"{_name(world)}: restore() returns {type(restarted).__name__}, must be Restarted or None.")
    error, _ = StepSchema(world.spec, world.agents).find_error(restarted.step)
    mask = restarted.mask
    if not error and (mask.shape != (world.agents,) or mask.dtype != torch.bool):
        error = f"mask is {list(mask.shape)} {mask.dtype}, must be [{world.agents}] torch.bool"
    if error:
        raise ContractError(f"{_name(world)}: restore() returns Restarted, but {error}.")
    return restarted if bool(mask.any()) else None


def placeholder_step(spec: WorldSpec, agents: int, device: torch.device) -> Step:
    """Return a step of which no row is read."""
    no_agents = torch.zeros(agents, dtype=torch.bool, device=device)
    obs = zero_obs(spec.observation_space, agents).to(device)
    last_obs = obs if spec.truncates == "always" else None
    return Step(obs, torch.zeros(agents, device=device), *[no_agents] * 5, last_obs=last_obs)


def _require_plain(tree: object, path: str) -> None:
    """Require a state that can be read from a file without executing code."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if not isinstance(key, str):
                raise ContractError(f"{path} has the key {key!r}; the keys of a state are strings.")
            _require_plain(value, f"{path}[{key!r}]")
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            _require_plain(value, f"{path}[{number}]")
    elif isinstance(tree, np.ndarray | Tensor) and not _is_writable(tree):
        raise ContractError(
            f"{path} is {_describe(tree)}, which cannot be written to a file; give dense tensors, and arrays "
            "of numbers in this machine's byte order, of 64 bits at most."
        )
    elif not isinstance(tree, PLAIN):
        raise ContractError(
            f"{path} is {type(tree).__name__}; a state is made of dicts, lists, tensors, arrays of numbers, "
            "numbers, strings and None."
        )


def _is_writable(array: np.ndarray | Tensor) -> bool:
    if isinstance(array, Tensor):
        return array.layout is torch.strided and not (array.is_quantized or array.is_nested or array.is_meta)
    return array.dtype.kind in "biuf" and array.dtype.isnative and array.dtype.itemsize <= MAX_ITEMSIZE


def _describe(array: np.ndarray | Tensor) -> str:
    if isinstance(array, Tensor):
        return f"a tensor of {array.dtype}, {array.layout}, on {array.device}"
    return f"an array of {array.dtype.name}{'' if array.dtype.isnative else ' in foreign byte order'}"


def _name(world: World) -> str:
    return world.spec.name or type(world).__name__


def step_to_tree(step: Step) -> dict[str, Any]:
    """Convert a step to a tree of tensors."""
    values = {name: value for name, value in vars(step).items() if value is not None}
    return {name: value if isinstance(value, Tensor) else value.to_dict() for name, value in values.items()}


def step_from_tree(tree: Any, like: Step) -> Step:
    """Convert a tree back to a step with the shapes and dtypes of `like`."""
    values = {name: value for name, value in vars(like).items() if value is not None}
    if "last_obs" in values and "last_obs" not in tree:
        # Without truncated rows its last_obs is not read.
        tree = {**tree, "last_obs": get_field(tree, "obs", object)}
        if bool(get_field(tree, "truncated", Tensor).any()):
            raise ContractError("The checkpoint has truncated rows without last_obs.")
    return Step(**{name: _get_obs(tree, name, value) for name, value in values.items()})


def obs_from_tree(tree: Any, like: TensorDictBase) -> TensorDict:
    """Convert nested dicts back to a TensorDict with the shapes and dtypes of `like`."""
    leaves = {str(key): _get_obs(tree, str(key), cast("Obs", value)) for key, value in like.items()}
    return TensorDict(leaves, batch_size=like.batch_size)


def rows_from_tree(tree: Any, key: str, like: TensorDictBase, size: tuple[int, ...]) -> TensorDict:
    """Convert `tree[key]` to a TensorDict of batch size `size`, of any dtype; `like` has one batch axis."""
    saved, leaves = get_field(tree, key, dict), dict[str, Any]()
    for name, value in like.items():
        if not isinstance(value, Tensor):
            leaves[str(name)] = rows_from_tree(saved, str(name), cast("TensorDictBase", value), size)
            continue
        tensor, shape = get_field(saved, str(name), Tensor), (*size, *value.shape[1:])
        if tensor.shape != shape:
            raise mismatch(f"{name!r} is {list(tensor.shape)}, must be {list(shape)}")
        leaves[str(name)] = tensor.to(value.device, copy=True)
    return TensorDict(leaves, batch_size=size)


def _get_obs(tree: Any, key: str, like: Obs) -> Obs:
    if isinstance(like, Tensor):
        return get_tensor_like(tree, key, like)
    return obs_from_tree(get_field(tree, key, dict), like)
