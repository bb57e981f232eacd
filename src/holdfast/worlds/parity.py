"""`parity`: bits pass by, and it must be said whether the ones so far are even or odd in number."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.embedded import FULL, Embedded, Told, require
from holdfast.worlds.step import Feature, WorldSpec
from holdfast.worlds.tokens import pack_location

TOKENS = 4
PLACE = pack_location(5, 5)


class Parity(Embedded):
    """At each step a bit is shown; the action must say the parity of all the episode's bits so far.

    One bit of memory, but no linear one: each step flips it or not. The first step of an episode of
    `length` steps pays nothing (there the bit is the parity), each right answer after it 1/(length - 1), so
    the best return is 1.0. From the second step on the parity before the present bit is a fair coin that
    the present bit knows nothing of, so without memory the best return is 1/2, exactly. Both hold for every
    length: agents are put out of step by first episodes that are shorter, down to two steps. With
    `truncate`, episodes end by truncation.
    """

    def __init__(
        self,
        agents: int,
        *,
        length: int = 16,
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.length = require("length", length, 2, 1_000_000)
        spec = WorldSpec(
            obs_shape=(TOKENS, 3),
            action_names=("say_even", "say_odd"),
            features=(Feature("bit_0", float(FULL)), Feature("bit_1", float(FULL))),
            truncates="always" if truncate else "never",
            best_return=1.0,
            best_return_without_memory=0.5,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        self._bit = self._parity = self._judged = self._left = torch.zeros_like(self._agent)
        self._views = self._rows([[[PLACE, bit, FULL]] for bit in range(2)])

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        judged = self.length - 1
        if self._opening:
            self._bit = self._below(2, 0, 2)
            judged = 1 + self._below(self.length - 1, 1, 2)
        self._parity = torch.where(who, self._bit, self._parity)
        self._judged = torch.where(who, judged, self._judged)
        self._left = torch.where(who, judged + 1, self._left)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        right = (actions == self._parity) & (self._left <= self._judged)
        self._left = self._left - 1
        self._bit = self._below(2, 0, 2)
        self._parity = self._parity ^ self._bit
        return Told(right / self._judged, self._left == 0, last=self._last(self._views))

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._bit]
