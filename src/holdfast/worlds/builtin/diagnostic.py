"""Constant and Ragged: worlds that test the trainer."""

import torch

from holdfast.types import Bool, Int, Tensor, UInt8
from holdfast.worlds.builtin.symbols import TOKENS, cue_spec, cue_views
from holdfast.worlds.step import Feature, WorldSpec
from holdfast.worlds.tensor_world import Device, IntRange, Outcome, TensorWorld, as_range, require
from holdfast.worlds.tokens import GLOBAL


class Constant(TensorWorld):
    """Every step pays 1, whatever the action; an episode has `length` steps.

    The observation is the step of the episode, so no memory is needed; the return is `length`. With `truncate`, values
    bootstrap from the last observation, step `length`, and every step has the value
    1 + gamma + gamma^2 + ... = 1/(1 - gamma). Without it, step t has the value (1 - gamma^(length - t))/(1 - gamma).
    First episodes have full length, since shorter ones would return less.
    """

    def __init__(
        self, agents: int, *, length: int = 20, truncate: bool = False, seed: int = 0, device: Device = "cpu"
    ) -> None:
        self.length = require("length", length, 1, 255)
        spec = WorldSpec(
            obs_shape=(TOKENS, 3),
            action_names=("sit", "stand"),
            features=(Feature("elapsed", float(length)),),
            truncates="always" if truncate else "never",
            best_return=float(length),
            best_return_without_memory=float(length),
        )
        super().__init__(agents, spec, seed=seed, device=device)
        self._elapsed = torch.zeros_like(self._agent)
        self._views = self._rows([[[GLOBAL, 0, t]] for t in range(length + 1)])

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        self._elapsed = torch.where(mask, 0, self._elapsed)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        self._elapsed = self._elapsed + 1
        return Outcome(self._all_agents, self._elapsed == self.length)

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._elapsed]


class Ragged(TensorWorld):
    """As in `recall`, the first cue must be named when the query appears; then the agent is absent.

    The row that ends the episode has the last reward and is not `valid`; neither are the next rows, `absent` in all,
    and they show nothing. Then the agent returns: `first`, with the next cue. `absent` and `delay` are numbers or
    ranges, drawn per episode. Actions in invalid rows have no effect. The best return is 1.0; without memory the query
    looks the same for every cue, so it is exactly 1/cues.
    """

    def __init__(
        self,
        agents: int,
        *,
        delay: IntRange = (0, 8),
        absent: IntRange = (1, 8),
        cues: int = 4,
        truncate: bool = False,
        seed: int = 0,
        device: Device = "cpu",
    ) -> None:
        self.cues = require("cues", cues, 2, 100)
        self._delay, self._absent = as_range("delay", delay, 0), as_range("absent", absent, 0)
        super().__init__(agents, cue_spec(cues, truncate), seed=seed, device=device)
        self._cue = self._to_query = self._away = torch.zeros_like(self._agent)
        self._views = self._rows(cue_views(cues))

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        self._cue = torch.where(mask, self._randint(self.cues, 0, 3), self._cue)
        self._to_query = torch.where(mask, 1 + self._draw(self._delay, 1, 3), self._to_query)
        self._away = torch.where(mask, 0, self._away)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        """Step all agents; a negative `_to_query` means that the query was answered."""
        ended = self._to_query == 0
        reward = ended & (actions == self._cue)
        self._to_query = self._to_query - 1
        absent = self._to_query < 0
        self._away = torch.where(ended, self._draw(self._absent, 2, 3), self._away - 1)
        begins = absent & (self._away == 0)
        return Outcome(reward, ended, begins=begins, valid=~absent | begins)

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        view = torch.where(first, 2 + self._cue, 1)
        return self._views[torch.where(self._to_query == 0, 0, view)]
