"""`n_back`: symbols pass by, and the one of `back` steps ago must be named."""

import torch

from holdfast.errors import ConfigError
from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.embedded import FULL, Embedded, Told, naming_spec, require
from holdfast.worlds.tokens import pack_location

TOKENS = 4
PLACE = pack_location(5, 5)


class NBack(Embedded):
    """At each step one of `symbols` is drawn and shown; the action must name the one of `back` steps ago.

    Time must be right to the step: a batch read as `(t b)` instead of `(b t)` is never right. The first
    `back` steps of an episode of `length` steps pay nothing, each right answer after them
    1/(length - back), so the best return is 1.0. What is seen is independent of what was seen `back` steps
    ago, so without memory the best return is 1/symbols, exactly. Both hold for every length: agents are put
    out of step by first episodes that are shorter, down to one judged step. With `truncate`, episodes end
    by truncation.
    """

    def __init__(
        self,
        agents: int,
        *,
        back: int = 2,
        symbols: int = 4,
        length: int = 32,
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.back = require("back", back, 1, 1000)
        self.symbols = require("symbols", symbols, 2, 100)
        if length <= back:
            raise ConfigError(f"world.length={length}: give a number from back + 1 = {back + 1} on.")
        without = 1.0 / symbols
        spec = naming_spec("symbol", symbols, tokens=TOKENS, truncate=truncate, without_memory=without)
        super().__init__(agents, spec, seed=seed, device=device)
        self._judged_steps = length - back
        # What was shown at step t lies in row t % (back + 1).
        self._seen = torch.zeros(back + 1, agents, dtype=torch.long, device=device)
        self._left = self._judged = torch.zeros_like(self._agent)
        self._views = self._rows([[[PLACE, symbol, FULL]] for symbol in range(symbols)])

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        judged = self._judged_steps
        if self._opening:
            judged = 1 + self._below(self._judged_steps, 1, 2)
            # What nobody saw is never asked for: the first `back` steps are not judged.
            self._seen = self._below(self.symbols, 0, 2).expand_as(self._seen).clone()
        self._judged = torch.where(who, judged, self._judged)
        self._left = torch.where(who, judged + self.back, self._left)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        # The row that is written now holds what was shown `back` steps before the last.
        right = (actions == self._shown()) & (self._left <= self._judged)
        self._left = self._left - 1
        self._seen.index_copy_(0, self._row(), self._below(self.symbols, 0, 2)[None])
        return Told(right / self._judged, self._left == 0, last=self._last(self._views))

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._shown()]

    def _row(self) -> Int[Tensor, " 1"]:
        return (self._clock % len(self._seen)).view(1)

    def _shown(self) -> Int[Tensor, " A"]:
        return self._seen.index_select(0, self._row())[0]
