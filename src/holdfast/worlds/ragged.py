"""`ragged`: agents come, are asked for a cue, go, and are away for a while, each at its own time."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.embedded import Embedded, Told, range_of, require
from holdfast.worlds.recall import cue_spec, cue_views


class Ragged(Embedded):
    """As in `recall`, a cue seen at first must be named when the query appears; then the agent is gone.

    The row of its end tells the last reward and is not `valid` any more; nobody acts in it for `absent`
    steps, and nothing is seen. Then it comes back: `first`, with the next cue. `absent` and `delay` are
    numbers or ranges, drawn anew each time. What is done in the row of somebody who is away does nothing.
    The best return is 1.0; without memory the query looks the same whatever the cue was, so it is 1/cues,
    exactly. With `truncate`, episodes end by truncation.
    """

    def __init__(
        self,
        agents: int,
        *,
        delay: int | tuple[int, int] = (0, 8),
        absent: int | tuple[int, int] = (1, 8),
        cues: int = 4,
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.cues = require("cues", cues, 2, 100)
        self._delay, self._absent = range_of("delay", delay, 0), range_of("absent", absent, 0)
        super().__init__(agents, cue_spec(cues, truncate), seed=seed, device=device)
        self._cue = self._to_query = self._away = torch.zeros_like(self._agent)
        self._views = self._rows(cue_views(cues))

    def _drawn(self, ends: tuple[int, int], which: int) -> Int[Tensor, " A"]:
        return ends[0] + self._below(ends[1] - ends[0] + 1, which, 3)

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        self._cue = torch.where(who, self._below(self.cues, 0, 3), self._cue)
        self._to_query = torch.where(who, 1 + self._drawn(self._delay, 1), self._to_query)
        self._away = torch.where(who, 0, self._away)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        """Let those act who are there; below 0, `to_query` says that the query was answered."""
        ended = self._to_query == 0
        reward = ended & (actions == self._cue)
        self._to_query = self._to_query - 1
        gone = self._to_query < 0
        self._away = torch.where(ended, self._drawn(self._absent, 2), self._away - 1)
        begins = gone & (self._away == 0)
        return Told(reward, ended, begins=begins, valid=~gone | begins)

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        seen = torch.where(first, 2 + self._cue, 1)
        return self._views[torch.where(self._to_query == 0, 0, seen)]
