"""`recall`: a cue is shown once, and must be named after a delay. Without memory it cannot be solved."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds import tokens
from holdfast.worlds.embedded import FULL, Embedded, Told, naming_spec, range_of, require
from holdfast.worlds.step import Feature, WorldSpec

TOKENS = 4
CUE_PLACE = tokens.pack_location(4, 5)


def cue_spec(cues: int, truncate: bool) -> WorldSpec:
    """Say what a world is in which a cue is named when it is asked for."""
    query, without = Feature("query", 1.0), 1.0 / cues
    return naming_spec("cue", cues, tokens=TOKENS, truncate=truncate, without_memory=without, also=(query,))


def cue_views(cues: int) -> list[list[list[int]]]:
    """List what can be seen there: the query, nothing, then each cue."""
    return [[[tokens.GLOBAL, 0, 1]], [], *([[CUE_PLACE, 1 + cue, FULL]] for cue in range(cues))]


class Recall(Embedded):
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
        shortest, longest = range_of("delay", delay, 0)
        self.cues = require("cues", cues, 2, 100)
        super().__init__(agents, cue_spec(cues, truncate), seed=seed, device=device)
        self._shortest, self._spread = shortest, longest - shortest + 1
        self._cue = torch.zeros_like(self._agent)
        self._to_query = torch.zeros_like(self._agent)
        self._views = self._rows(cue_views(cues))

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        self._cue = torch.where(who, self._below(self.cues, 0, 2), self._cue)
        delay = self._shortest + self._below(self._spread, 1, 2)
        self._to_query = torch.where(who, delay + 1, self._to_query)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        ended = self._to_query == 0
        self._to_query = self._to_query - 1
        return Told(ended & (actions == self._cue), ended)

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        seen = torch.where(first, 2 + self._cue, 1)
        return self._views[torch.where(self._to_query == 0, 0, seen)]
