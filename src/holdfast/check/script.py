"""Scripts: observations, actions and flags of every agent, drawn before the policy runs."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from holdfast.errors import ConfigError
from holdfast.types import Bool, Shaped, Tensor

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""Draw observations or actions: `draw(size, generator) -> [*size, ...]`."""
Batch = TypeVar("Batch", bound="StepBatch")
OBS_FIELDS = {"obs", "other_obs"}


@dataclass(frozen=True)
class StepBatch:
    """Inputs of a policy: one step `[A]`, or segments `[B,T]`."""

    obs: Shaped[Tensor, "..."]
    first: Bool[Tensor, "*batch"]
    """The observation starts an episode; clear, then read."""
    terminated: Bool[Tensor, "*batch"]
    """The previous step ended an episode by termination."""
    truncated: Bool[Tensor, "*batch"]
    trial: Bool[Tensor, "*batch"]
    valid: Bool[Tensor, "*batch"]
    action: Shaped[Tensor, "..."]
    """The action taken, for policies that evaluate log-probabilities of given actions."""

    @property
    def batch(self) -> torch.Size:
        """The axes all fields share."""
        return self.first.shape

    def __getitem__(self: Batch, index: Any) -> Batch:
        return type(self)(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def transposed(self: Batch) -> Batch:
        """Exchange the first two axes."""
        return type(self)(**{field.name: getattr(self, field.name).transpose(0, 1) for field in fields(self)})

    def to(self: Batch, dtype: torch.dtype, device: torch.device | None = None) -> Batch:
        """Move all fields to a device, and floating-point observations to a dtype."""
        moved = {field.name: getattr(self, field.name).to(device) for field in fields(self)}
        for name in OBS_FIELDS & moved.keys():
            moved[name] = moved[name].to(dtype) if moved[name].is_floating_point() else moved[name]
        return type(self)(**moved)

    def without_flags(self: Batch) -> Batch:
        """Set all episode flags to false, for callers that clear the state themselves."""
        return self.with_starts(torch.zeros_like(self.first))

    def with_starts(self: Batch, first: Bool[Tensor, "*batch"]) -> Batch:
        """Replace the episode starts; each follows a termination."""
        never = torch.zeros_like(first)
        return replace(self, first=first, terminated=first, truncated=never, trial=never)


@dataclass(frozen=True)
class Script(StepBatch):
    """All steps of every agent `[A,N+1]`: one more than is run, for the bootstrap value."""

    other_obs: Shaped[Tensor, "A N1 ..."]
    """A second draw of all observations, used to change them."""

    @property
    def agents(self) -> int:
        """Number of agents."""
        return self.first.shape[0]

    @property
    def steps(self) -> int:
        """Number of steps to run."""
        return self.first.shape[1] - 1

    def step_batches(self, start: int, stop: int) -> StepBatch:
        """Copy the steps from `start` to `stop`, `[A,T]`."""
        return StepBatch(**{f.name: getattr(self, f.name)[:, start:stop].clone() for f in fields(StepBatch)})

    def at(self, t: int) -> StepBatch:
        """Copy one step, `[A]`."""
        return self.step_batches(t, t + 1)[:, 0]

    def changed(self, where: Bool[Tensor, "A N1"]) -> "Script":
        """Replace the observations where the mask is true."""
        mask = where.reshape(*where.shape, *[1] * (self.obs.dim() - 2))
        return replace(self, obs=torch.where(mask, self.other_obs, self.obs))

    def swapped(self) -> "Script":
        """Exchange the two draws of observations."""
        return replace(self, obs=self.other_obs, other_obs=self.obs)

    def rolled(self) -> "Script":
        """Give every agent the observations of its neighbour."""
        return replace(self, obs=self.obs.roll(1, 0), other_obs=self.other_obs.roll(1, 0))


def write_script(
    draw_obs: Draw, agents: int, steps: int, *, share_of_starts: float, absences: bool, act: Draw, seed: int = 0
) -> Script:
    """Draw a script with random episode starts, trials and, with `absences`, invalid steps."""
    generator = torch.Generator().manual_seed(seed)
    size = (agents, steps + 1)
    first, truncates, trial, absent = (
        torch.rand(size, generator=generator) < share for share in (share_of_starts, 0.5, 0.06, 0.06)
    )
    first[:, 0] = True
    absent[:, 0] = False
    obs = draw_obs(size, generator)
    script = Script(
        obs=obs,
        first=first,
        terminated=first & ~truncates,
        truncated=first & truncates,
        trial=trial,
        valid=~absent if absences else torch.ones_like(absent),
        action=act(size, generator),
        other_obs=_draw_different(obs, draw_obs, generator),
    )
    # No episode ends before the first step.
    script.terminated[:, 0] = script.truncated[:, 0] = False
    return script


def _draw_different(obs: Tensor, draw: Draw, generator: torch.Generator) -> Tensor:
    """Draw observations that differ from `obs` at every step."""
    size = tuple(obs.shape[:2])
    other = draw(size, generator)
    for _ in range(100):
        same = (other == obs).reshape(*size, -1).all(-1)
        if not bool(same.any()):
            return other
        other = torch.where(same.reshape(*size, *[1] * (obs.dim() - 2)), draw(size, generator), other)
    raise ConfigError("The observation space has one element, so there is nothing to remember.")
