"""A world's step as one CUDA graph: the host says one word where it said forty."""

import gc
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from holdfast.errors import ContractError
from holdfast.shapes import Int, Tensor
from holdfast.worlds.step import Step

WARM_UPS = 3
"""Steps taken before recording, so that everything that is made once has been made."""


class Recorded:
    """Plays a step of a world on tensors from a recording of it.

    What the world keeps from step to step lies in fixed places, which are its own attributes: recorded, a
    step reads them and writes them back. What it tells is copied out of fixed places too, so a
    step once told is not overwritten by the next.
    """

    def __init__(self, world: Any, advance: Callable[[Tensor], Step], actions: Int[Tensor, " A"]) -> None:
        self._actions = torch.zeros_like(actions)
        before = tensors_of(world)
        kept = {name: each.clone() for name, each in before.items()}
        self._places = self._find_places(world, advance, before)
        # Trying it moved the world on; it is put back where it was.
        vars(world).update(kept)
        for name in self._places:
            self._places[name] = kept[name]
        self._graph = torch.cuda.CUDAGraph()
        # Graphs that nobody needs any more are let go of now.
        gc.collect()
        with torch.cuda.graph(self._graph):
            told = advance(self._actions)
            for name, place in self._places.items():
                place.copy_(vars(world)[name])
            self._layout = _Layout(told)
        vars(world).update(self._places)

    def _find_places(
        self, world: Any, advance: Callable[[Tensor], Step], before: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Find what the world keeps from step to step: attributes that a step makes anew or writes into."""
        versions = {name: each._version for name, each in before.items()}
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                advance(self._actions)
        torch.cuda.current_stream().wait_stream(aside)
        after = tensors_of(world)
        if after.keys() != before.keys():
            new = ", ".join(sorted(after.keys() - before.keys()))
            raise ContractError(f"{type(world).__name__} makes {new} in a step; make it in __init__.")
        return {
            name: each
            for name, each in before.items()
            if after[name] is not each or each._version != versions[name]
        }

    def load(self, world: Any) -> None:
        """Take the world as it is now, after a reset, into the fixed places.

        The world is not kept here: it keeps this, and two that keep each other are let go of at any time,
        in the middle of another recording too, which spoils that one.
        """
        for name, place in self._places.items():
            now = vars(world)[name]
            if now is not place:
                place.copy_(now)
                vars(world)[name] = place

    def put_back(self, world: Any, tensors: dict[str, Tensor]) -> None:
        """Give the world other tensors; those that no step writes are read where they lay when recorded."""
        for name, each in tensors.items():
            if name in self._places:
                vars(world)[name] = each
            else:
                vars(world)[name].copy_(each)

    def step(self, actions: Int[Tensor, " A"]) -> Step:
        """Take a step."""
        self._actions.copy_(actions)
        self._graph.replay()
        return self._layout.copy()


class _Layout:
    """Where each part of a step lies: what is seen by itself, the rest end to end in one buffer of bytes."""

    def __init__(self, told: Step) -> None:
        self._parts: list[tuple[str, int, int, torch.Size, torch.dtype]] = []
        small, start = _small(told), 0
        # The widest first, so that each begins where its kind of number may begin.
        for name in sorted(small, key=lambda name: -small[name].element_size()):
            leaf = small[name]
            stop = start + leaf.numel() * leaf.element_size()
            self._parts.append((name, start, stop, leaf.shape, leaf.dtype))
            start = stop
        parts = [small[name].contiguous().flatten().view(torch.uint8) for name, *_ in self._parts]
        self._buffer = torch.cat(parts)
        self._seen = {name: leaf for name, leaf in _parts(told).items() if name not in small}

    def copy(self) -> Step:
        buffer = self._buffer.clone()
        said: dict[str, Any] = {
            name: buffer[start:stop].view(dtype).view(shape)
            for name, start, stop, shape, dtype in self._parts
        }
        return Step(**said, **{name: leaf.clone() for name, leaf in self._seen.items()})


def _small(told: Step) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in _parts(told).items() if name not in ("obs", "last_obs")}


def _parts(told: Step) -> dict[str, Tensor]:
    found = {field.name: getattr(told, field.name) for field in fields(told)}
    return {name: leaf for name, leaf in found.items() if leaf is not None}


def tensors_of(world: Any) -> dict[str, Tensor]:
    """List the tensors among a world's own attributes."""
    return {name: each for name, each in vars(world).items() if isinstance(each, Tensor)}
