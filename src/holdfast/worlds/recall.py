"""`recall`: a cue is shown once, and must be named after a delay. Without memory it cannot be solved."""

import torch

from holdfast.errors import ConfigError, ContractError
from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds import draws, tokens
from holdfast.worlds.step import Feature, Step, WorldSpec, check_actions

TOKENS = 4
CUE_PLACE = tokens.pack_location(4, 5)
CUE_SIZE = 255
"""A cue speaks at the full size of its normalisation; at a hundredth of it, it was not learnt."""


class Recall:
    """A cue is visible in an episode's first observation only, and must be named at its end.

    After `delay` empty observations a query appears, and the action must say which of `cues` it was.
    An episode lasts delay + 2 steps and pays 1 or 0 at its end. The best return is 1.0; without memory
    the query looks the same whatever the cue was, so the best is 1/cues, exactly. A range of delays is
    drawn anew each episode. With `truncate`, episodes end by truncation.
    """

    def __init__(
        self,
        agents: int,
        *,
        delay: int | tuple[int, int] = 8,
        cues: int = 4,
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        shortest, longest = (delay, delay) if isinstance(delay, int) else delay
        if agents < 1:
            raise ConfigError(f"world.agents={agents}: there must be at least 1.")
        if not 0 <= shortest <= longest:
            raise ConfigError(f"world.delay={delay}: give a number or a range such as 4..24.")
        if not 2 <= cues <= 100:
            raise ConfigError(f"world.cues={cues}: give a number from 2 to 100.")
        self.agents = agents
        self.spec = WorldSpec(
            obs_shape=(TOKENS, 3),
            action_names=tuple(f"name_cue_{cue}" for cue in range(cues)),
            features=(
                Feature("query", 1.0),
                *(Feature(f"cue_{cue}", float(CUE_SIZE)) for cue in range(cues)),
            ),
            truncates="always" if truncate else "never",
            best_return=1.0,
            best_return_without_memory=1.0 / cues,
        )
        self.seed, self.cues, self.truncate = seed, cues, truncate
        self._shortest, self._spread = shortest, longest - shortest + 1
        self._agent = torch.arange(agents, device=device)
        self._nobody = torch.zeros(agents, dtype=torch.bool, device=device)
        self._cue_tokens = torch.tensor(
            [[CUE_PLACE, 1 + cue, CUE_SIZE] for cue in range(cues)], device=device
        ).to(torch.uint8)
        self._query_token = torch.tensor([tokens.GLOBAL, 0, 1], device=device).to(torch.uint8)
        self._clock = -1

    def reset(self) -> Step:
        """Start every agent's first episode."""
        self._clock = 0
        everybody = ~self._nobody
        self._cue = torch.zeros_like(self._agent)
        self._to_query = torch.zeros_like(self._agent)
        self._begin(everybody)
        return self._tell(ended=self._nobody, first=everybody, reward=torch.zeros_like(self._cue))

    def step(self, actions: Int[Tensor, " A"]) -> Step:
        """Judge the actions of those who were asked, and start their next episode."""
        if self._clock < 0:
            raise ContractError("Call reset() before the first step().")
        check_actions(actions, self.agents, self.cues)
        self._clock += 1
        ended = self._to_query == 0
        reward = ended & (actions == self._cue)
        self._to_query = self._to_query - 1
        self._begin(ended)
        return self._tell(ended=ended, first=ended, reward=reward)

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        where = (self.seed, draws.STREAM_WORLD, self._agent)
        cue = draws.below(self.cues, *where, 2 * self._clock)
        delay = self._shortest + draws.below(self._spread, *where, 2 * self._clock + 1)
        self._cue = torch.where(who, cue, self._cue)
        self._to_query = torch.where(who, delay + 1, self._to_query)

    def _tell(self, ended: Tensor, first: Tensor, reward: Tensor) -> Step:
        return Step(
            obs=self._look(first),
            reward=reward.float(),
            terminated=self._nobody if self.truncate else ended,
            truncated=ended if self.truncate else self._nobody,
            first=first,
            valid=~self._nobody,
            trial=self._nobody,
            last_obs=tokens.empty(self.agents, TOKENS, ended.device) if self.truncate else None,
        )

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        obs = tokens.empty(self.agents, TOKENS, first.device)
        asked = self._to_query == 0
        said = torch.where(first[:, None], self._cue_tokens[self._cue], obs[:, 0])
        obs[:, 0] = torch.where(asked[:, None], self._query_token, said)
        return obs
