"""What worlds on tensors share: the clock, the checks, the flags, and the restart in the same step."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.errors import ConfigError, ContractError
from holdfast.saved import misfit, require_same, taken, tensor_like
from holdfast.shapes import Bool, Int, Shaped, Tensor, UInt8
from holdfast.worlds import draws, tokens
from holdfast.worlds.recorded import Recorded, tensors_of
from holdfast.worlds.step import Feature, Step, WorldSpec, check_actions

FULL = 255
"""A token that says one of several things speaks at the full size of its normalisation; at a hundredth of
it, it was not learnt."""


@dataclass(frozen=True)
class Told:
    """What came of the actions, before anybody's next episode begins."""

    reward: Shaped[Tensor, " A"]
    ended: Bool[Tensor, " A"]
    begins: Bool[Tensor, " A"] | None = None
    """Whose next episode begins; none: theirs that ended."""
    valid: Bool[Tensor, " A"] | None = None
    """Who is there to act; none: everybody."""
    trial: Bool[Tensor, " A"] | None = None
    """Whose next trial begins; none: nobody's."""
    last: UInt8[Tensor, "A M 3"] | None = None
    """What those saw last whose episode ended, asked for with `truncate`; none: what is there then."""


class Embedded(ABC):
    """A batch of agents on one device. A world writes how episodes begin, what actions do, what is seen.

    Each step everybody acts, those whose episode ended begin the next one, and everybody looks. All three
    work on all agents at once and choose by masks; none looks at a number, so the host never waits for the
    device. Draws are pure functions of (seed, agent, clock).

    On a GPU the first step records them as a CUDA graph, and every later one plays it: forty small kernels
    cost their own time and not that of forty calls. So what a world keeps from step to step are tensors,
    attributes of its own that are there before the first step.
    """

    def __init__(self, agents: int, spec: WorldSpec, *, seed: int, device: str | torch.device) -> None:
        if agents < 1:
            raise ConfigError(f"world.agents={agents}: there must be at least 1.")
        self.agents, self.spec, self.seed = agents, spec, seed
        self.truncate = spec.truncates == "always"
        self._agent = torch.arange(agents, device=device)
        self._nobody = torch.zeros(agents, dtype=torch.bool, device=device)
        self._everybody = ~self._nobody
        self._clock = torch.zeros((), dtype=torch.long, device=device)
        self._begun = self._opening = False
        self._recorded: Recorded | None = None

    def count_from(self, first_agent: int) -> None:
        """Draw as a share of a bigger world does whose first agent is this one; said before `reset()`."""
        self._agent = self._agent + first_agent

    @abstractmethod
    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        """Start the next episode of some agents; if `opening` the first one of all, whatever was before."""

    @abstractmethod
    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        """Let everybody act, and judge it."""

    @abstractmethod
    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        """Show everybody what is there now."""

    def reset(self) -> Step:
        """Start every agent's first episode."""
        self._clock = torch.zeros_like(self._clock)
        self._begun = self._opening = True
        self._begin(self._everybody)
        self._opening = False
        told = Told(torch.zeros_like(self._agent), self._nobody)
        return self._tell(told, self._everybody, self._nothing() if self.truncate else None)

    def step(self, actions: Int[Tensor, " A"]) -> Step:
        """Judge everybody's action, and start the next episode of those whose episode ended."""
        if not self._begun:
            raise ContractError("Call reset() before the first step().")
        check_actions(actions, self.agents, len(self.spec.action_names))
        if actions.device.type != "cuda":
            return self._advance(actions)
        with torch.cuda.device(actions.device):
            if self._recorded is None:
                self._recorded = Recorded(self, self._advance, actions)
            self._recorded.load(self)
            return self._recorded.step(actions)

    def state(self) -> dict[str, Any]:
        """Give all tensors that are its own: draws need no more than the clock among them."""
        if not self._begun:
            raise ContractError("Call reset() before state().")
        tensors = {name: each.clone() for name, each in tensors_of(self).items()}
        return {"seed": self.seed, "tensors": tensors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where a world made with the same arguments was."""
        require_same(state, "seed", self.seed)
        kept, own = taken(state, "tensors", dict), tensors_of(self)
        odd = sorted(str(name) for name in kept.keys() - own.keys())
        if odd:
            raise misfit(f"{type(self).__name__} has no {odd[0]!r}")
        tensors = {name: tensor_like(kept, name, each) for name, each in own.items()}
        if self._recorded is None:
            vars(self).update(tensors)
        else:
            self._recorded.put_back(self, tensors)
        self._begun = True

    def _advance(self, actions: Int[Tensor, " A"]) -> Step:
        self._clock += 1
        told, last = self._act(actions), None
        if self.truncate:
            seen = self._look(self._nobody) if told.last is None else told.last
            last = torch.where(told.ended[:, None, None], seen, self._nothing())
        first = told.ended if told.begins is None else told.begins
        self._begin(first)
        return self._tell(told, first, last)

    def _tell(self, told: Told, first: Tensor, last: Tensor | None) -> Step:
        return Step(
            obs=self._look(first),
            reward=told.reward.float(),
            terminated=self._nobody if self.truncate else told.ended,
            truncated=told.ended if self.truncate else self._nobody,
            first=first,
            valid=self._everybody if told.valid is None else told.valid,
            trial=self._nobody if told.trial is None else told.trial,
            last_obs=last,
        )

    def _nothing(self) -> UInt8[Tensor, "A M 3"]:
        return tokens.empty(self.agents, self.spec.obs_shape[0], self._agent.device)

    def _below(self, limit: int, which: int = 0, of: int = 1) -> Int[Tensor, " A"]:
        """Draw a whole number in [0, limit) for each agent: draw `which` of the `of` draws of this step."""
        return draws.below(limit, self.seed, draws.STREAM_WORLD, self._agent, of * self._clock + which)

    def _last(self, views: UInt8[Tensor, "N M 3"]) -> UInt8[Tensor, "A M 3"] | None:
        """Draw which view an episode ends on, for worlds that show any of them at each step.

        The draw of this step opens the next episode: one draw for both would tell what comes next.
        """
        if not self.truncate:
            return None
        # Counters below zero, which no step of the clock reaches.
        return views[draws.below(len(views), self.seed, draws.STREAM_WORLD, self._agent, -1 - self._clock)]

    def _rows(self, rows: list[list[list[int]]]) -> UInt8[Tensor, "N M 3"]:
        """Make a table of observations from their tokens, padded to the size of one."""
        M = self.spec.obs_shape[0]
        full = [[*row, *[[tokens.PADDING] * 3] * (M - len(row))] for row in rows]
        return torch.tensor(full, device=self._agent.device).to(torch.uint8)


def naming_spec(
    word: str,
    count: int,
    *,
    tokens: int,
    truncate: bool,
    without_memory: float,
    also: tuple[Feature, ...] = (),
) -> WorldSpec:
    """Say what a world is in which one of `count` things is to be named; the best return is 1."""
    return WorldSpec(
        obs_shape=(tokens, 3),
        action_names=tuple(f"name_{word}_{number}" for number in range(count)),
        features=(*also, *(Feature(f"{word}_{number}", float(FULL)) for number in range(count))),
        truncates="always" if truncate else "never",
        best_return=1.0,
        best_return_without_memory=without_memory,
    )


def range_of(key: str, given: int | tuple[int, int], least: int) -> tuple[int, int]:
    """Read a number or a range as its two ends."""
    low, high = (given, given) if isinstance(given, int) else given
    if not least <= low <= high:
        raise ConfigError(
            f"world.{key}={given}: give a number from {least} on or a range such as {least + 4}..{least + 9}."
        )
    return low, high


def require(key: str, given: int, low: int, high: int) -> int:
    """Refuse a number outside of its limits."""
    if not low <= given <= high:
        raise ConfigError(f"world.{key}={given}: give a number from {low} to {high}.")
    return given
