"""`key_value`: pairs are shown once, one a step; then keys are asked, and their values must be named."""

import torch

from holdfast.shapes import Bool, Int, Tensor, UInt8
from holdfast.worlds import draws, tokens
from holdfast.worlds.embedded import FULL, Embedded, Told, require
from holdfast.worlds.step import Feature, WorldSpec

TOKENS = 4
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
        self.pairs, self.values = require("pairs", pairs, 1, 60), require("values", values, 2, 60)
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
        # Two orders of the keys and their values: the draws of an episode.
        self._count = torch.arange(3 * pairs, device=self._agent.device)
        self._keys = self._value = torch.zeros(agents, pairs, dtype=torch.long, device=self._agent.device)
        self._asked_keys = self._keys
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
        counter = self._clock * (3 * n + 1) + self._count
        drawn = draws.bits(self.seed, draws.STREAM_WORLD, self._agent[:, None], counter)
        asks = 1 + self._below(n, 3 * n, 3 * n + 1) if self._opening else n
        # Numbers drawn for each key, sorted: an order of the keys.
        order = drawn[:, : 2 * n].unflatten(1, (2, n)).argsort(dim=2)
        value = ((drawn[:, 2 * n :] & 0x7FFFFFFF) * self.values) >> 31
        many = who[:, None]
        self._keys = torch.where(many, order[:, 0], self._keys)
        self._asked_keys = torch.where(many, order[:, 1], self._asked_keys)
        self._value = torch.where(many, value, self._value)
        self._asks = torch.where(who, asks, self._asks)
        self._age = torch.where(who, 0, self._age)

    def _key(self) -> Int[Tensor, " A"]:
        """Say which key is shown or asked now."""
        t = self._age.clamp(max=2 * self.pairs - 1)[:, None]
        return torch.cat([self._keys, self._asked_keys], dim=1).gather(1, t)[:, 0]

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
