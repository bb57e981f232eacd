"""Worlds whose agents are not all answered at once, and worlds that are a share of a bigger one."""

from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch

from holdfast.shapes import Int, Shaped, Tensor
from holdfast.worlds.step import Step, World

EVERYBODY = slice(None)
"""All rows."""


@dataclass(frozen=True)
class Turn:
    """What some of the agents were told, and are to answer."""

    rows: Int[Tensor, " N"]
    """Which agents, each at most once; on the CPU."""
    step: Step
    """What they were told: `[N,...]`, in the order of `rows`."""


@runtime_checkable
class TakesTurns(World, Protocol):
    """A world in which some can be answered while others still act: worlds and policy work side by side.

    After `reset()` and after `step()` everybody has been told something. From then on those who are answered
    act by themselves, and `turn()` gives those whose act is done. `step(actions)` is the same for everybody
    at once.
    """

    shares: tuple[Int[Tensor, " _"], ...]
    """Who is answered together when everybody has been told something; each agent is in one of them."""

    def answer(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Let some agents act, and do not wait for what comes of it."""
        ...

    def turn(self) -> Turn:
        """Wait for some of those who were answered, and give what they are told."""
        ...


@runtime_checkable
class CountsFrom(Protocol):
    """A world that can be a share of a bigger one: its agents live as those of the bigger one would."""

    def count_from(self, first_agent: int) -> None:
        """Draw for agents `first_agent`, `first_agent + 1` and so on; said before `reset()`."""
        ...


def place_of(rows: Int[Tensor, " N"], device: torch.device) -> slice | Tensor:
    """Say where rows lie: a slice where they follow each other, which is a view and not a copy."""
    first = int(rows[0])
    if torch.equal(rows, torch.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows.to(device)


def picked(step: Step, rows: Int[Tensor, " N"]) -> Step:
    """Take some rows of a step, in this order."""
    place = place_of(rows, step.reward.device)
    parts = dict[str, Any]()
    for each in fields(step):
        whole = getattr(step, each.name)
        parts[each.name] = None if whole is None else whole[place]
    return Step(**parts)


def joined(turns: list[Turn]) -> Step:
    """Put turns together in which everybody is once, in the order of the agents; all is copied."""
    rows = torch.cat([turn.rows for turn in turns])
    order = place_of(rows.argsort(), turns[0].step.reward.device)
    parts = dict[str, Any]()
    for each in fields(Step):
        found = [getattr(turn.step, each.name) for turn in turns]
        parts[each.name] = None if found[0] is None else torch.cat(found)[order]
    return Step(**parts)


def moved(step: Step, device: torch.device) -> Step:
    """Hand a step over to a device; one that lies there stays as it is."""
    if step.reward.device == device:
        return step
    parts = dict[str, Any]()
    for each in fields(step):
        whole = getattr(step, each.name)
        parts[each.name] = None if whole is None else whole.to(device)
    return Step(**parts)
