"""What waits to be answered when a rollout ends, as a tree that can be saved."""

from dataclasses import fields
from typing import Any, cast

from tensordict import TensorDict, TensorDictBase

from holdfast.errors import ContractError
from holdfast.saved import taken, tensor_like
from holdfast.shapes import Tensor
from holdfast.worlds import Step
from holdfast.worlds.seen import Seen


def tree_of_step(step: Step) -> dict[str, Any]:
    """Write a step as a tree."""
    told = {each.name: getattr(step, each.name) for each in fields(step)}
    return {name: tree_of_seen(part) for name, part in told.items() if part is not None}


def step_from(tree: Any, like: Step) -> Step:
    """Read a step back; it must be of the same kinds as one that the world told."""
    parts: dict[str, Any] = {}
    for each in fields(like):
        known = getattr(like, each.name)
        # One that was kept when nothing could be truncated does not say what was last seen: nobody reads it.
        name = "obs" if each.name == "last_obs" and "last_obs" not in tree else each.name
        if known is not None:
            parts[each.name] = _seen_from(tree, name, known)
    step = Step(**parts)
    if step.last_obs is not None and "last_obs" not in tree and bool(step.truncated.any()):
        raise ContractError("What was saved says who was truncated, and not what was last seen.")
    return step


def tree_of_seen(seen: Seen) -> Any:
    """Write what is seen, or any other tree of tensors."""
    if isinstance(seen, Tensor):
        return seen
    return {str(key): tree_of_seen(cast("Seen", part)) for key, part in seen.items()}


def seen_from(tree: Any, like: TensorDictBase) -> TensorDict:
    """Read a tree of tensors back, each like the one that is there."""
    leaves = {str(key): _seen_from(tree, str(key), cast("Seen", part)) for key, part in like.items()}
    return TensorDict(leaves, batch_size=like.batch_size)


def rows_from(tree: Any, key: str, like: TensorDictBase, size: tuple[int, ...]) -> TensorDict:
    """Read rows back of which only the kinds are known: `like` is a batch of one axis, of any length."""
    leaves = dict[str, Any]()
    for name, part in like.items():
        if isinstance(part, Tensor):
            found = taken(taken(tree, key, dict), str(name), Tensor)
            if found.shape != (*size, *part.shape[1:]):
                raise ContractError(
                    f"What was saved as {name!r} is {list(found.shape)}; it must be "
                    f"{[*size, *part.shape[1:]]}."
                )
            leaves[str(name)] = found.to(part.device, copy=True)
        else:
            inside = cast("TensorDictBase", part)
            leaves[str(name)] = rows_from(taken(tree, key, dict), str(name), inside, size)
    return TensorDict(leaves, batch_size=size)


def _seen_from(tree: Any, key: str, like: Seen) -> Seen:
    if isinstance(like, Tensor):
        return tensor_like(tree, key, like)
    return seen_from(taken(tree, key, dict), like)
