"""Of what kind everything in a step is, and whether what is seen can be seen at all."""

from collections.abc import Iterator
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from holdfast.shapes import Bool, Shaped, Tensor
from holdfast.worlds import Step, WorldSpec, tokens
from holdfast.worlds.seen import blank, device_of, parts_of

FLAGS = ("terminated", "truncated", "first", "valid", "trial")


def flat_leaves(obs: Any, name: str) -> dict[str, Tensor]:
    """List the tensors of an observation by their places in it: `obs`, or `obs['image']` and so on."""
    if isinstance(obs, Tensor):
        return {name: obs}
    found: dict[str, Tensor] = {}
    for key in sorted(obs.keys()) if isinstance(obs, TensorDictBase) else []:
        found |= flat_leaves(obs[key], f"{name}[{key!r}]")
    return found


class Kinds:
    """What kinds of tensors a world must speak in, by its spec."""

    def __init__(self, spec: WorldSpec, agents: int) -> None:
        self.spec, self.agents = spec, agents
        self._wanted = flat_leaves(blank(spec.sight), "")

    def fault_of(self, step: Any) -> tuple[str, bool]:
        """Tell the first thing in a step that is of the wrong kind, and whether the rest can be read."""
        if not isinstance(step, Step):
            return f"the world says {type(step).__name__}, must be holdfast.Step", False
        fault, readable = self.seen_fault(step.obs, "obs")
        if not readable:
            return fault, False
        for name in ("reward", *FLAGS):
            told, whole = getattr(step, name), f"a tensor [{self.agents}]"
            if not isinstance(told, Tensor):
                return f"{name} is {type(told).__name__}, must be {whole}", False
            if told.shape != (self.agents,):
                return f"{name} is {list(told.shape)}, must be {whole}", False
            right = told.is_floating_point() if name == "reward" else told.dtype == torch.bool
            if not fault and not right:
                fault = f"{name} is {told.dtype}, must be {'a float' if name == 'reward' else 'torch.bool'}"
            if not fault and told.device != device_of(step.obs):
                fault = f"{name} lies on {told.device}, must lie where obs does, on {device_of(step.obs)}"
        return fault, True

    def seen_fault(self, seen: Any, name: str) -> tuple[str, bool]:
        """Tell what of an observation is of another kind than the spec says, and whether it can be read."""
        wanted = {f"{name}{place}": leaf for place, leaf in self._wanted.items()}
        there, fault = flat_leaves(seen, name), ""
        if set(wanted) != set(there):
            is_now = ", ".join(sorted(there)) or type(seen).__name__
            return f"{name} is {is_now}, must be {', '.join(sorted(wanted))} as torch tensors", False
        for key, leaf in there.items():
            shape, dtype = [self.agents, *wanted[key].shape[1:]], wanted[key].dtype
            if list(leaf.shape) != shape:
                return f"{key} is {list(leaf.shape)}, must be {shape}", False
            # Tokens are bytes; elsewhere fractions may have any precision, and whole numbers any size.
            right = leaf.is_floating_point() == dtype.is_floating_point
            if not fault and (leaf.dtype != dtype if self.spec.features else not right):
                fault = f"{key} is {leaf.dtype}, must be {dtype}"
        return fault, True


def outside(
    spec: WorldSpec, leaves: dict[str, Tensor], name: str
) -> Iterator[tuple[Bool[Tensor, "N A"], str]]:
    """Find rows `[N,A]` that show what the spec says cannot be seen, and say what it is."""
    if spec.features:
        yield from _wrong_tokens(spec, leaves[name])
        return
    for key, space in _plain_spaces(spec.sight, name):
        leaf = leaves[key]
        low, high = (edge.to(leaf.device) for edge in _edges(space))
        # As written: NaN is outside of everything.
        bad = ~((leaf >= low) & (leaf <= high) & leaf.isfinite())
        told = ""
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            edges = (float(edge.expand(leaf.shape[2:])[at[2:]]) for edge in (low, high))
            told = f"{key} is {leaf[at].item():g}, must be finite, from {next(edges):g} to {next(edges):g}"
        yield bad.flatten(2).any(2) if bad.dim() > 2 else bad, told


def _plain_spaces(space: spaces.Space[Any], name: str) -> Iterator[tuple[str, spaces.Space[Any]]]:
    parts = parts_of(space)
    if not parts:
        yield name, space
    for key, part in parts.items():
        yield from _plain_spaces(part, f"{name}[{key!r}]")


def _edges(space: spaces.Space[Any]) -> tuple[Tensor, Tensor]:
    """Say between what an observation of one tensor lies."""
    if isinstance(space, spaces.Box):
        return torch.as_tensor(space.low), torch.as_tensor(space.high)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        start = torch.as_tensor(space.start)
        return start, start + torch.as_tensor(
            space.n if isinstance(space, spaces.Discrete) else space.nvec
        ) - 1
    return torch.tensor(0), torch.tensor(1)


def _wrong_tokens(
    spec: WorldSpec, seen: Shaped[Tensor, "N A M 3"]
) -> Iterator[tuple[Bool[Tensor, "N A"], str]]:
    """Find tokens without a place in the window, of no feature, or behind padding."""
    place, feature, _ = seen.long().unbind(-1)
    padding, (rows, columns) = place == tokens.PADDING, spec.window
    inside = (place == tokens.GLOBAL) | ((place >> 4 < rows) & (place & 15 < columns))
    known = torch.isin(feature, torch.tensor(spec.feature_ids, device=seen.device))
    # Once there is padding, there is nothing else.
    begun = padding.cumsum(-1) > 0
    for bad, told in (
        (padding & (seen != tokens.PADDING).any(-1), "padding is 255 in all three bytes"),
        (begun & ~padding, "a token behind padding; padding comes last"),
        (~padding & ~inside, f"a place outside of the window of {rows} x {columns}"),
        (~padding & ~known, f"a feature that is none of {', '.join(map(str, spec.feature_ids))}"),
    ):
        found = ""
        if bool(bad.any()):
            at = tuple(bad.nonzero()[0].tolist())
            found = f"token {at[2]} is {seen[at].tolist()}: {told}"
        yield bad.any(-1), found
