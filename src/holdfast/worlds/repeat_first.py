"""`repeat_first`: symbols pass by, and at every step the episode's first one must be named."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.embedded import FULL, Embedded, Told, naming_spec, range_of, require
from holdfast.worlds.tokens import pack_location

TOKENS = 4
PLACE = pack_location(5, 5)


class RepeatFirst(Embedded):
    """At each step one of `symbols` is drawn and shown; the action must name the episode's first one.

    Nothing marks the first one: whoever clears memory late or not at all, or enters a segment with another
    state than it was left with, names something else. Each right answer pays 1/length, so the best return is
    1.0. `length` is longer than a segment of 64 steps; a range (the default) is drawn anew each episode, so
    that agents fall out of step. (A shortened first episode would do that too, but change the return without
    memory.) With `truncate`, episodes end by truncation.

    Without memory: an observation says nothing of the first symbol, unless it is the first. Naming what one
    sees is right there and 1 time in `symbols` elsewhere, and nothing is better at either, so the best
    return is the mean of (1 + (length - 1) / symbols) / length over the lengths there are.
    """

    def __init__(
        self,
        agents: int,
        *,
        symbols: int = 4,
        length: int | tuple[int, int] = (65, 95),
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.symbols = require("symbols", symbols, 2, 100)
        shortest, longest = range_of("length", length, 2)
        lengths = range(shortest, longest + 1)
        without = sum((1 + (E - 1) / symbols) / E for E in lengths) / len(lengths)
        spec = naming_spec("symbol", symbols, tokens=TOKENS, truncate=truncate, without_memory=without)
        super().__init__(agents, spec, seed=seed, device=device)
        self._shortest, self._spread = shortest, len(lengths)
        self._symbol = self._named = self._length = self._left = torch.zeros_like(self._agent)
        self._views = self._rows([[[PLACE, symbol, FULL]] for symbol in range(symbols)])

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        if self._opening:
            self._symbol = self._below(self.symbols, 0, 2)
        length = self._shortest + self._below(self._spread, 1, 2)
        self._named = torch.where(who, self._symbol, self._named)
        self._length = torch.where(who, length, self._length)
        self._left = torch.where(who, length, self._left)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        reward = (actions == self._named) / self._length
        self._left = self._left - 1
        self._symbol = self._below(self.symbols, 0, 2)
        return Told(reward, self._left == 0, last=self._last(self._views))

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._symbol]
