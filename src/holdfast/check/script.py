"""Scripted lives: observations, flags and nothing else, so that the laws meet no sampling and no world."""

from dataclasses import dataclass, fields, replace

import torch

from holdfast.shapes import Bool, Int, Shaped, Tensor
from holdfast.worlds import Step, WorldSpec, draws


@dataclass(frozen=True)
class Script:
    """What every agent will see, step by step; one step more than is lived, for the tail."""

    obs: Shaped[Tensor, "A N1 ..."]
    first: Bool[Tensor, "A N1"]
    truncates: Bool[Tensor, "A N1"]
    """Which of the episode ends are truncations; the others are terminations."""
    trial: Bool[Tensor, "A N1"]
    valid: Bool[Tensor, "A N1"]
    other_obs: Shaped[Tensor, "A N1 ..."]
    """A second draw of everything there is to see, to change observations to."""

    @property
    def agents(self) -> int:
        """How many agents live."""
        return self.obs.shape[0]

    @property
    def steps(self) -> int:
        """How many steps they live."""
        return self.obs.shape[1] - 1

    def changed(self, where: Bool[Tensor, "A N1"]) -> "Script":
        """Let agents see something else at some steps."""
        mask = where.reshape(*where.shape, *[1] * (self.obs.dim() - 2))
        return replace(self, obs=torch.where(mask, self.other_obs, self.obs))

    def of(self, agents: Int[Tensor, " n"]) -> "Script":
        """Take some agents, in some order."""
        return Script(**{each.name: getattr(self, each.name)[agents] for each in fields(self)})


def write_script(spec: WorldSpec, agents: int, steps: int, *, share_of_starts: float, seed: int) -> Script:
    """Draw a script: random observations that fit the world; starts, trials and absences anywhere."""
    generator = torch.Generator().manual_seed(seed)
    size = (agents, steps + 1)
    first, truncates, trial, absent = (
        torch.rand(size, generator=generator) < share for share in (share_of_starts, 0.5, 0.06, 0.06)
    )
    first[:, 0], absent[:, 0] = True, False
    return Script(
        obs=_observations(spec, size, generator),
        first=first,
        truncates=truncates,
        trial=trial,
        valid=~absent,
        other_obs=_observations(spec, size, generator),
    )


def _observations(spec: WorldSpec, size: tuple[int, int], generator: torch.Generator) -> Tensor:
    if not spec.features:
        return torch.randn(*size, *spec.obs_shape, generator=generator)
    shape = (*size, spec.obs_shape[0])
    rows, columns = (torch.randint(side, shape, generator=generator) for side in spec.window)
    feature = torch.randint(len(spec.features), shape, generator=generator)
    norm = torch.tensor([feature.normalization for feature in spec.features])
    share = 0.25 + 0.75 * torch.rand(shape, generator=generator)
    value = (norm[feature] * share).ceil().clamp(max=255)
    return torch.stack([rows << 4 | columns, feature, value.long()], dim=-1).to(torch.uint8)


class ScriptedWorld:
    """A world that reads from a script, whatever the agents do."""

    def __init__(self, spec: WorldSpec, script: Script) -> None:
        self.agents, self.script = script.agents, script
        self.spec = replace(spec, truncates="always" if bool(script.truncates.any()) else "never")
        self._clock = 0

    def reset(self) -> Step:
        """Read the first line."""
        self._clock = 0
        return self._tell()

    def step(self, actions: Int[Tensor, " A"]) -> Step:
        """Read the next line."""
        self._clock += 1
        return self._tell()

    def _tell(self) -> Step:
        t, script = self._clock, self.script
        first = script.first[:, t]
        ended = first if t else torch.zeros_like(first)
        agent = torch.arange(self.agents, device=first.device)
        return Step(
            obs=script.obs[:, t],
            reward=draws.uniform(0, draws.STREAM_WORLD, agent, t),
            terminated=ended & ~script.truncates[:, t],
            truncated=ended & script.truncates[:, t],
            first=first,
            valid=script.valid[:, t],
            trial=script.trial[:, t],
            last_obs=script.other_obs[:, t],
        )
