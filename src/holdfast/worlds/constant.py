"""`constant`: every step pays 1, so that it is known to the digit what a value must be."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds.embedded import Embedded, Told, require
from holdfast.worlds.step import Feature, WorldSpec
from holdfast.worlds.tokens import GLOBAL

TOKENS = 4


class Constant(Embedded):
    """Whatever is done, every step pays 1; an episode lasts `length` steps and then begins anew.

    The step of the episode is shown, so no memory is needed; the return is `length` for everybody. With
    `truncate` the end is no end to the value: the last observation shows step `length`, and a step is worth
    1 + gamma + gamma^2 + ... = 1/(1 - gamma), always. Without it, step t is worth
    (1 - gamma^(length - t))/(1 - gamma): see `value`. First episodes are whole, since shorter ones would
    return less.
    """

    def __init__(
        self,
        agents: int,
        *,
        length: int = 20,
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
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

    def value(self, gamma: float, elapsed: int) -> float:
        """Say exactly what step `elapsed` of an episode is worth."""
        if self.truncate:
            return 1 / (1 - gamma)
        return sum(gamma**t for t in range(self.length - elapsed))

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        self._elapsed = torch.where(who, 0, self._elapsed)

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        self._elapsed = self._elapsed + 1
        return Told(self._everybody, self._elapsed == self.length)

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._elapsed]
