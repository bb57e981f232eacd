"""Scripted lives: what agents see and when episodes begin, written down before anybody lives them."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from holdfast.errors import ConfigError
from holdfast.shapes import Bool, Int, Shaped, Tensor

Imagine = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""Draw observations: `imagine(size, generator) -> [*size, ...]`."""
Some = TypeVar("Some", bound="Moments")
SIGHTS = {"obs", "other_obs"}


@dataclass(frozen=True)
class Moments:
    """What agents meet: one step `[A]`, or segments `[B,T]`."""

    obs: Shaped[Tensor, "..."]
    first: Bool[Tensor, "*batch"]
    """The observation opens an episode; clear, then read."""
    terminated: Bool[Tensor, "*batch"]
    """An episode ended just before it, and not because time was up."""
    truncated: Bool[Tensor, "*batch"]
    trial: Bool[Tensor, "*batch"]
    valid: Bool[Tensor, "*batch"]
    action: Shaped[Tensor, "..."]
    """What is done then, for policies that judge actions given to them."""

    @property
    def batch(self) -> torch.Size:
        """The axes all parts share."""
        return self.first.shape

    def __getitem__(self: Some, index: Any) -> Some:
        return type(self)(**{each.name: getattr(self, each.name)[index] for each in fields(self)})

    def to(self: Some, dtype: torch.dtype, device: torch.device | None = None) -> Some:
        """Show observations that are fractions in another precision, and everything elsewhere."""
        shown = {each.name: getattr(self, each.name).to(device) for each in fields(self)}
        for name in SIGHTS & shown.keys():
            shown[name] = shown[name].to(dtype) if shown[name].is_floating_point() else shown[name]
        return type(self)(**shown)

    def without_flags(self: Some) -> Some:
        """Take every flag that tells of a start away: somebody else clears."""
        never = torch.zeros_like(self.first)
        return replace(self, first=never, terminated=never, truncated=never, trial=never)

    def with_starts(self: Some, first: Bool[Tensor, "*batch"]) -> Some:
        """Begin episodes elsewhere; all of them after a termination, but for the very first step."""
        never = torch.zeros_like(first)
        return replace(self, first=first, terminated=first, truncated=never, trial=never)


@dataclass(frozen=True)
class Script(Moments):
    """The whole life of every agent `[A,N+1]`: one step more than is lived, for the tail."""

    other_obs: Shaped[Tensor, "A N1 ..."]
    """A second draw of everything there is to see, to change observations to."""

    @property
    def agents(self) -> int:
        """How many agents live."""
        return self.first.shape[0]

    @property
    def steps(self) -> int:
        """How many steps they live."""
        return self.first.shape[1] - 1

    def moments(self, start: int, stop: int) -> Moments:
        """Cut a stretch out of everybody's life, `[A,T]`."""
        cut = {each.name: getattr(self, each.name)[:, start:stop].clone() for each in fields(Moments)}
        return Moments(**cut)

    def at(self, t: int) -> Moments:
        """Take one step of everybody's life, `[A]`."""
        return self.moments(t, t + 1)[:, 0]

    def changed(self, where: Bool[Tensor, "A N1"]) -> "Script":
        """Let agents see something else at some steps."""
        mask = where.reshape(*where.shape, *[1] * (self.obs.dim() - 2))
        return replace(self, obs=torch.where(mask, self.other_obs, self.obs))

    def of(self, agents: Int[Tensor, " n"]) -> "Script":
        """Take some agents, in some order."""
        return self[agents]

    def copied(self) -> "Script":
        """Copy everything, for whoever might write into it."""
        return Script(**{each.name: getattr(self, each.name).clone() for each in fields(self)})


def write_script(
    imagine: Imagine,
    agents: int,
    steps: int,
    *,
    share_of_starts: float,
    absences: bool,
    act: Imagine,
    seed: int = 0,
) -> Script:
    """Draw a script: observations and actions somebody imagines; starts, trials and absences anywhere."""
    generator = torch.Generator().manual_seed(seed)
    size = (agents, steps + 1)
    first, truncates, trial, absent = (
        torch.rand(size, generator=generator) < share for share in (share_of_starts, 0.5, 0.06, 0.06)
    )
    first[:, 0] = True
    absent[:, 0] = False
    obs = imagine(size, generator)
    script = Script(
        obs=obs,
        first=first,
        terminated=first & ~truncates,
        truncated=first & truncates,
        trial=trial,
        valid=~absent if absences else torch.ones_like(absent),
        action=act(size, generator),
        other_obs=_another(obs, imagine, generator),
    )
    # Nothing ended before the run began.
    script.terminated[:, 0] = script.truncated[:, 0] = False
    return script


def _another(obs: Tensor, imagine: Imagine, generator: torch.Generator) -> Tensor:
    """Draw observations that differ from the given ones everywhere."""
    size = tuple(obs.shape[:2])
    other = imagine(size, generator)
    for _ in range(100):
        same = (other == obs).reshape(*size, -1).all(-1)
        if not bool(same.any()):
            return other
        other = torch.where(same.reshape(*size, *[1] * (obs.dim() - 2)), imagine(size, generator), other)
    raise ConfigError("There is only one observation to see, so nothing can be remembered.")
