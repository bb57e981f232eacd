"""`recall`: a cue is shown once, and must be named after a delay. Without memory it cannot be solved."""

import torch

from holdfast.errors import ConfigError
from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds import tokens
from holdfast.worlds.embedded import FULL, Embedded, Told, naming_spec, require
from holdfast.worlds.step import Feature

TOKENS = 4
CUE_PLACE = tokens.pack_location(4, 5)


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
        shortest, longest = (delay, delay) if isinstance(delay, int) else delay
        if not 0 <= shortest <= longest:
            raise ConfigError(f"world.delay={delay}: give a number or a range such as 4..24.")
        self.cues = require("cues", cues, 2, 100)
        spec = naming_spec(
            "cue",
            cues,
            tokens=TOKENS,
            truncate=truncate,
            without_memory=1.0 / cues,
            also=(Feature("query", 1.0),),
        )
        super().__init__(agents, spec, seed=seed, device=device)
        self._shortest, self._spread = shortest, longest - shortest + 1
        self._cue = torch.zeros_like(self._agent)
        self._to_query = torch.zeros_like(self._agent)
        # Row 0 is the query, row 1 is nothing, then the cues.
        self._views = self._rows(
            [[[tokens.GLOBAL, 0, 1]], [], *([[CUE_PLACE, 1 + cue, FULL]] for cue in range(cues))]
        )

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
