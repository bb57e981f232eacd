"""Whether what is seen can be seen at all."""

from collections.abc import Iterator
from typing import Any

import torch
from gymnasium import spaces

from holdfast.shapes import Bool, Shaped, Tensor
from holdfast.worlds import WorldSpec, tokens
from holdfast.worlds.seen import parts_of


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
