"""`key_value`: pairs are shown once, one a step; then keys are asked, and their values must be named."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds import draws, tokens
from holdfast.worlds.embedded import FULL, Embedded, Told, require
from holdfast.worlds.step import Feature, WorldSpec

TOKENS = 4
MOST = 60
"""Pairs and values there can be."""
PART = 2**21 - 1
"""A third of a draw."""
KEY_PLACE, VALUE_PLACE = tokens.pack_location(5, 4), tokens.pack_location(5, 6)


class KeyValue(Embedded):
    """Each of `pairs` keys is shown once with one of `values`; then each is asked once, in another order.

    The more pairs, the more must be held at once: capacity. Orders and values are drawn anew each episode.
    Each right answer pays 1/pairs, so the best return is 1.0. A key that is asked looks the same whatever
    its value, and values are drawn one by one, so without memory the best return is 1/values, exactly. Both
    hold for any number of asked keys: agents are put out of step by first episodes that ask fewer (1 to
    `pairs`) and pay more for each. An episode lasts 2 * pairs steps. With `truncate`, episodes end by
    truncation.
    """

    def __init__(
        self,
        agents: int,
        *,
        pairs: int = 4,
        values: int = 4,
        truncate: bool = False,
        seed: int = 0,
        device: str | torch.device = "cpu",
    ) -> None:
        self.pairs, self.values = require("pairs", pairs, 1, MOST), require("values", values, 2, MOST)
        names = [f"{kind}_{key}" for kind in ("key", "asked") for key in range(pairs)]
        names += [f"value_{value}" for value in range(values)]
        spec = WorldSpec(
            obs_shape=(TOKENS, 3),
            action_names=tuple(f"name_value_{value}" for value in range(values)),
            features=tuple(Feature(name, float(FULL)) for name in names),
            truncates="always" if truncate else "never",
            best_return=1.0,
            best_return_without_memory=1.0 / values,
        )
        super().__init__(agents, spec, seed=seed, device=device)
        self._count = torch.arange(pairs, device=self._agent.device)
        self._value = torch.zeros(agents, pairs, dtype=torch.long, device=self._agent.device)
        # The keys in the order in which they are shown, then in that in which they are asked.
        self._keys = torch.zeros(agents, 2 * pairs, dtype=torch.long, device=self._agent.device)
        self._age = self._asks = torch.zeros_like(self._agent)
        self._views = self._view_table()

    def _view_table(self) -> UInt8[Tensor, "N M 3"]:
        """List what can be seen: every pair, every key that is asked, and nothing."""
        each = range(self.pairs), range(self.values)
        shown = [
            [[KEY_PLACE, key, FULL], [VALUE_PLACE, 2 * self.pairs + value, FULL]]
            for key in each[0]
            for value in each[1]
        ]
        return self._rows([*shown, *([[KEY_PLACE, self.pairs + key, FULL]] for key in each[0]), []])

    def _begin(self, who: Bool[Tensor, " A"]) -> None:
        n = self.pairs
        counter = self._clock * (n + 1) + self._count
        drawn = draws.bits(self.seed, draws.STREAM_WORLD, self._agent[:, None], counter)
        asks = 1 + self._below(n, n, n + 1) if self._opening else n
        # One draw a key, in three parts that know nothing of each other: two orders and a value.
        order = _order(torch.stack([drawn >> 42, drawn >> 21], dim=1) & PART)
        value = ((drawn & PART) * self.values) >> PART.bit_length()
        many = who[:, None]
        self._keys = torch.where(many, order.flatten(1), self._keys)
        self._value = torch.where(many, value, self._value)
        self._asks = torch.where(who, asks, self._asks)
        self._age = torch.where(who, 0, self._age)

    def _key(self) -> Int[Tensor, " A"]:
        """Say which key is shown or asked now."""
        t = self._age.clamp(max=2 * self.pairs - 1)[:, None]
        return self._keys.gather(1, t)[:, 0]

    def _act(self, actions: Int[Tensor, " A"]) -> Told:
        right = actions == self._value.gather(1, self._key()[:, None])[:, 0]
        reward = (right & (self._age >= self.pairs)) / self._asks
        self._age = self._age + 1
        return Told(reward, self._age == self.pairs + self._asks)

    def _look(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        key = self._key()
        pair = key * self.values + self._value.gather(1, key[:, None])[:, 0]
        asked = self.pairs * self.values + key
        over = self._age == self.pairs + self._asks
        seen = torch.where(self._age < self.pairs, pair, asked)
        return self._views[torch.where(over, len(self._views) - 1, seen)]


def _order(drawn: Int[Tensor, "A k n"]) -> Int[Tensor, "A k n"]:
    """Order things by numbers drawn for them, as argsort does; that one cannot be recorded on a GPU."""
    thing = torch.arange(drawn.shape[-1], device=drawn.device)
    # No two alike: the low bits say which thing it is.
    unlike = (drawn << MOST.bit_length()) | thing
    rank = torch.zeros_like(drawn)
    for other in unlike.split(1, dim=-1):
        rank += unlike > other
    return torch.empty_like(rank).scatter_(-1, rank, thing.expand_as(rank))
