"""Worlds whose agents are not all answered at once, and worlds that are a share of a bigger one."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from holdfast.shapes import Int, Shaped, Tensor
from holdfast.worlds.step import Step, World


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

    shares: tuple[Int[Tensor, " N"], ...]
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
