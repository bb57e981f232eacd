"""Going on where a run was interrupted: a world says where it is, and is put back there."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from holdfast.errors import ContractError, HoldfastError
from holdfast.saved import misfit
from holdfast.shapes import Tensor
from holdfast.worlds.kind import Kinds
from holdfast.worlds.seen import choose, nothing_seen
from holdfast.worlds.step import Anew, Keeps, Step, World, WorldSpec

T = TypeVar("T")
PLAIN = (Tensor, np.ndarray, bool, int, float, str, type(None))
"""What the leaves of a state are."""
MOST_BYTES = 8
"""Bytes of the largest numbers that are written."""
NOT_KEPT = "the world cannot say where it was: it has no state() and restore(state)"


def state_of(world: World) -> dict[str, Any] | None:
    """Say where a world is; None if it cannot."""
    if not isinstance(world, Keeps):
        return None
    try:
        state = world.state()
    except HoldfastError:
        raise
    except Exception as error:
        raise ContractError(f"{_name(world)}: state() failed with {_said(error)}.") from error
    if state is not None:
        _require_plain(state, f"{_name(world)}: state()")
    return state


def go_on(world: World, state: Mapping[str, Any] | None, pending: Step) -> tuple[Step, Anew | None]:
    """Put a world back to where it was, and give the step that is to be answered next.

    That is `pending`, the one that was told last and that nobody answered. Those who could not be put back
    see their new episode in it instead: `first`, with nothing told of the one before.
    """
    fault, _ = Kinds(world.spec, world.agents).fault_of(pending)
    if fault:
        raise misfit(f"in the step that was not answered, {fault}")
    anew = put_back(world, state)
    if anew is None:
        return pending, None
    who, step = anew.who, anew.step
    told = Step(
        obs=choose(who, step.obs, pending.obs),
        reward=torch.where(who, 0.0, pending.reward),
        terminated=pending.terminated & ~who,
        truncated=pending.truncated & ~who,
        first=pending.first | who,
        valid=torch.where(who, step.valid, pending.valid),
        trial=pending.trial & ~who,
        last_obs=pending.last_obs,
    )
    return told, anew


def put_back(world: World, state: Mapping[str, Any] | None) -> Anew | None:
    """Put a world back to where it was; one without a state begins anew. Tell who did, if anybody."""
    if state is None:
        step = world.reset()
        return Anew(torch.ones_like(step.first), step, NOT_KEPT)
    if not isinstance(world, Keeps):
        raise misfit(f"there is one, but {_name(world)} has no state() and restore(state)")
    try:
        anew = world.restore(state)
    except HoldfastError:
        raise
    except Exception as error:
        raise misfit(f"restore() of {_name(world)} failed with {_said(error)}") from error
    if anew is None:
        return None
    if not isinstance(anew, Anew):
        raise ContractError(f"{_name(world)}: restore() gives {type(anew).__name__}, must be Anew or None.")
    fault, _ = Kinds(world.spec, world.agents).fault_of(anew.step)
    who = anew.who
    if not fault and (who.shape != (world.agents,) or who.dtype != torch.bool):
        fault = f"who is {list(who.shape)} {who.dtype}, must be [{world.agents}] torch.bool"
    if fault:
        raise ContractError(f"{_name(world)}: restore() tells who begins anew, but {fault}.")
    return anew if bool(who.any()) else None


def unread(spec: WorldSpec, agents: int, device: torch.device) -> Step:
    """Make a step of which nobody reads a row."""
    nobody = torch.zeros(agents, dtype=torch.bool, device=device)
    obs = nothing_seen(spec.sight, agents).to(device)
    last = obs if spec.truncates == "always" else None
    return Step(obs, torch.zeros(agents, device=device), *[nobody] * 5, last_obs=last)


def _require_plain(tree: object, place: str) -> None:
    """Refuse a state that could not be written down without executing code to read it."""
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            if not isinstance(key, str):
                raise ContractError(f"{place} has the key {key!r}; the keys of a state are words.")
            _require_plain(each, f"{place}[{key!r}]")
    elif isinstance(tree, list):
        for number, each in enumerate(tree):
            _require_plain(each, f"{place}[{number}]")
    elif isinstance(tree, np.ndarray | Tensor) and not _can_be_written(tree):
        raise ContractError(
            f"{place} is {_kind(tree)}, which cannot be written to a file; give dense tensors, and arrays of "
            "numbers in this machine's byte order, of 64 bits at most."
        )
    elif not isinstance(tree, PLAIN):
        raise ContractError(
            f"{place} is {type(tree).__name__}; a state is made of dicts, lists, tensors, arrays of numbers, "
            "numbers, words and None."
        )


def _can_be_written(found: np.ndarray | Tensor) -> bool:
    if isinstance(found, Tensor):
        return found.layout is torch.strided and not (found.is_quantized or found.is_nested or found.is_meta)
    # PyTorch has no numbers of more bits, and takes none whose bytes are the other way round.
    return found.dtype.kind in "biuf" and found.dtype.isnative and found.dtype.itemsize <= MOST_BYTES


def _kind(found: np.ndarray | Tensor) -> str:
    if isinstance(found, Tensor):
        return f"a tensor of {found.dtype}, {found.layout}, on {found.device}"
    order = "" if found.dtype.isnative else ", its bytes the other way round"
    return f"an array of {found.dtype.name}{order}"


def _name(world: World) -> str:
    return world.spec.name or type(world).__name__


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
