"""Recall, RepeatFirst, NBack, Parity and KeyValue: name a symbol from memory."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from holdfast import rng
from holdfast.errors import ConfigError
from holdfast.types import Bool, Int, Tensor, UInt8
from holdfast.worlds.step import Feature, WorldSpec
from holdfast.worlds.tensor_world import FULL, Device, IntRange, Outcome, TensorWorld, as_range, require
from holdfast.worlds.tokens import GLOBAL, pack_location

TOKENS = 4
CENTRE, ABOVE, LEFT, RIGHT = (pack_location(*cell) for cell in ((5, 5), (4, 5), (5, 4), (5, 6)))
"""The centre of the window, where the agent is, and cells next to it."""


def naming_spec(features: Iterable[str], actions: Iterable[str], truncate: bool, without_memory: float) -> WorldSpec:
    """Return the spec of a world where an action names a symbol; the best return is 1."""
    return WorldSpec(
        obs_shape=(TOKENS, 3),
        action_names=tuple(actions),
        features=tuple(Feature(name, float(FULL)) for name in features),
        truncates="always" if truncate else "never",
        best_return=1.0,
        best_return_without_memory=without_memory,
    )


def symbol_spec(word: str, count: int, truncate: bool, without_memory: float) -> WorldSpec:
    """Return the spec of a world where one of `count` symbols is shown and must be named."""
    names = [f"{word}_{number}" for number in range(count)]
    return naming_spec(names, [f"name_{name}" for name in names], truncate, without_memory)


def cue_spec(cues: int, truncate: bool) -> WorldSpec:
    """Return the spec of a world where a cue is named at a query."""
    spec = symbol_spec("cue", cues, truncate, 1.0 / cues)
    return replace(spec, features=(Feature("query", 1.0), *spec.features))


def cue_views(cues: int) -> list[list[list[int]]]:
    """Return its observations as tokens: the query, nothing, then each cue."""
    return [[[GLOBAL, 0, 1]], [], *([[ABOVE, 1 + cue, FULL]] for cue in range(cues))]


class Recall(TensorWorld):
    """A cue is visible in an episode's first observation only, and must be named at its end.

    After `delay` empty observations a query appears, and the action must name which of `cues` it was. An episode has
    delay + 2 steps and pays 1 or 0 at its end. The best return is 1.0; without memory the query looks the same for
    every cue, so it is exactly 1/cues. With a range, the delay is drawn per episode.
    """

    def __init__(
        self,
        agents: int,
        *,
        delay: IntRange = 8,
        cues: int = 4,
        truncate: bool = False,
        seed: int = 0,
        device: Device = "cpu",
    ) -> None:
        self._delay, self.cues = as_range("delay", delay, 0), require("cues", cues, 2, 100)
        super().__init__(agents, cue_spec(cues, truncate), seed=seed, device=device)
        self._cue = self._to_query = torch.zeros_like(self._agent)
        self._views = self._rows(cue_views(cues))

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        self._cue = torch.where(mask, self._randint(self.cues, 0, 2), self._cue)
        self._to_query = torch.where(mask, 1 + self._draw(self._delay, 1, 2), self._to_query)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        ended = self._to_query == 0
        self._to_query = self._to_query - 1
        return Outcome(ended & (actions == self._cue), ended)

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        view = torch.where(first, 2 + self._cue, 1)
        return self._views[torch.where(self._to_query == 0, 0, view)]


class RepeatFirst(TensorWorld):
    """At each step one of `symbols` is drawn and shown; the action must name the episode's first one.

    Nothing marks the first one: a policy that clears memory late or never, or starts a segment from a wrong entry
    state, names another. Each right answer pays 1/length, so the best return is 1.0. `length` is longer than a segment
    of 64 steps; with a range (the default) it is drawn per episode, which puts agents out of phase. (A shortened first
    episode would do that too, but change the return without memory.)

    Without memory: only the first observation depends on the first symbol. Naming the current symbol is right
    there and with probability 1/symbols elsewhere, and nothing is better at either, so the best return is the
    mean of (1 + (length - 1) / symbols) / length over the lengths.
    """

    def __init__(
        self,
        agents: int,
        *,
        symbols: int = 4,
        length: IntRange = (65, 95),
        truncate: bool = False,
        seed: int = 0,
        device: Device = "cpu",
    ) -> None:
        self.symbols, self._bounds = require("symbols", symbols, 2, 100), as_range("length", length, 2)
        lengths = range(self._bounds[0], self._bounds[1] + 1)
        without = sum((1 + (E - 1) / symbols) / E for E in lengths) / len(lengths)
        super().__init__(agents, symbol_spec("symbol", symbols, truncate, without), seed=seed, device=device)
        self._symbol = self._named = self._length = self._left = torch.zeros_like(self._agent)
        self._views = self._rows([[[CENTRE, symbol, FULL]] for symbol in range(symbols)])

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        if self._opening:
            self._symbol = self._randint(self.symbols, 0, 2)
        length = self._draw(self._bounds, 1, 2)
        self._named = torch.where(mask, self._symbol, self._named)
        self._length = torch.where(mask, length, self._length)
        self._left = torch.where(mask, length, self._left)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        reward = (actions == self._named) / self._length
        self._left = self._left - 1
        self._symbol = self._randint(self.symbols, 0, 2)
        return Outcome(reward, self._left == 0, last=self._last(self._views))

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._symbol]


class NBack(TensorWorld):
    """At each step one of `symbols` is drawn and shown; the action must name the one of `back` steps ago.

    Time must be exact to the step: a batch read as `(t b)` instead of `(b t)` fails. The first `back` steps of an
    episode of `length` steps pay nothing, each right answer after them 1/(length - back), so the best return is 1.0.
    The observation is independent of that of `back` steps ago, so without memory the best return is exactly 1/symbols.
    Both hold for every length: shorter first episodes, down to one judged step, put agents out of phase.
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
        device: Device = "cpu",
    ) -> None:
        self.back, self.symbols = require("back", back, 1, 1000), require("symbols", symbols, 2, 100)
        if length <= back:
            raise ConfigError(f"world.length={length}: give a number from back + 1 = {back + 1} on.")
        super().__init__(agents, symbol_spec("symbol", symbols, truncate, 1.0 / symbols), seed=seed, device=device)
        self._judged_steps = length - back
        # The symbol of step t is in row t % (back + 1).
        self._symbols = torch.zeros(back + 1, agents, dtype=torch.long, device=device)
        self._left = self._judged = torch.zeros_like(self._agent)
        self._views = self._rows([[[CENTRE, symbol, FULL]] for symbol in range(symbols)])

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        judged = self._judged_steps
        if self._opening:
            judged = 1 + self._randint(self._judged_steps, 1, 2)
            # Never queried: the first `back` steps are not judged.
            self._symbols = self._randint(self.symbols, 0, 2).expand_as(self._symbols).clone()
        self._judged = torch.where(mask, judged, self._judged)
        self._left = torch.where(mask, judged + self.back, self._left)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        # The row to be overwritten has the symbol of `back` steps before the last.
        right = (actions == self._current()) & (self._left <= self._judged)
        self._left = self._left - 1
        self._symbols.index_copy_(0, self._row(), self._randint(self.symbols, 0, 2)[None])
        return Outcome(right / self._judged, self._left == 0, last=self._last(self._views))

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._current()]

    def _row(self) -> Int[Tensor, " 1"]:
        return (self._clock % len(self._symbols)).view(1)

    def _current(self) -> Int[Tensor, " A"]:
        return self._symbols.index_select(0, self._row())[0]


class Parity(TensorWorld):
    """At each step a bit is shown; the action must name the parity of all the episode's bits so far.

    It needs one bit of memory with a nonlinear update: each step flips it or not. The first step of an episode of
    `length` steps pays nothing (there the bit is the parity), each right answer after it 1/(length - 1), so the best
    return is 1.0. From the second step on the previous parity is a fair coin, independent of the current bit, so
    without memory the best return is exactly 1/2. Both hold for every length: shorter first episodes, down to two
    steps, put agents out of phase.
    """

    def __init__(
        self, agents: int, *, length: int = 16, truncate: bool = False, seed: int = 0, device: Device = "cpu"
    ) -> None:
        self.length = require("length", length, 2, 1_000_000)
        spec = naming_spec(("bit_0", "bit_1"), ("say_even", "say_odd"), truncate, 0.5)
        super().__init__(agents, spec, seed=seed, device=device)
        self._bit = self._parity = self._judged = self._left = torch.zeros_like(self._agent)
        self._views = self._rows([[[CENTRE, bit, FULL]] for bit in range(2)])

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        judged = self.length - 1
        if self._opening:
            self._bit = self._randint(2, 0, 2)
            judged = 1 + self._randint(self.length - 1, 1, 2)
        self._parity = torch.where(mask, self._bit, self._parity)
        self._judged = torch.where(mask, judged, self._judged)
        self._left = torch.where(mask, judged + 1, self._left)

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        right = (actions == self._parity) & (self._left <= self._judged)
        self._left = self._left - 1
        self._bit = self._randint(2, 0, 2)
        self._parity = self._parity ^ self._bit
        return Outcome(right / self._judged, self._left == 0, last=self._last(self._views))

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        return self._views[self._bit]


MOST = 60
"""Largest number of pairs and of values."""
PART = 2**21 - 1
"""Mask of a third of a draw."""


class KeyValue(TensorWorld):
    """Each of `pairs` keys is shown once with one of `values`; then each is queried once, in another order.

    It tests capacity: the more pairs, the more must be remembered at once. Orders and values are drawn per episode.
    Each right answer pays 1/pairs, so the best return is 1.0. A queried key looks the same for every value, and values
    are independent, so without memory the best return is exactly 1/values. Both hold for any number of queries: first
    episodes with fewer (1 to `pairs`), which pay more each, put agents out of phase. An episode has 2 * pairs steps.
    """

    def __init__(
        self,
        agents: int,
        *,
        pairs: int = 4,
        values: int = 4,
        truncate: bool = False,
        seed: int = 0,
        device: Device = "cpu",
    ) -> None:
        self.pairs, self.values = require("pairs", pairs, 1, MOST), require("values", values, 2, MOST)
        key_names = [f"{kind}_{key}" for kind in ("key", "asked") for key in range(pairs)]
        value_names = [f"value_{value}" for value in range(values)]
        actions = [f"name_{name}" for name in value_names]
        spec = naming_spec([*key_names, *value_names], actions, truncate, 1.0 / values)
        super().__init__(agents, spec, seed=seed, device=device)
        self._count = torch.arange(pairs, device=self._agent.device)
        self._value = torch.zeros(agents, pairs, dtype=torch.long, device=self._agent.device)
        # The keys in the order in which they are shown, then in the order of the queries.
        self._keys = torch.zeros(agents, 2 * pairs, dtype=torch.long, device=self._agent.device)
        self._age = self._queries = torch.zeros_like(self._agent)
        self._views = self._view_table()

    def _view_table(self) -> UInt8[Tensor, "N M 3"]:
        """Return all observations: every pair, every query, and nothing."""
        pairs = [
            [[LEFT, key, FULL], [RIGHT, 2 * self.pairs + value, FULL]]
            for key in range(self.pairs)
            for value in range(self.values)
        ]
        queries = [[[LEFT, self.pairs + key, FULL]] for key in range(self.pairs)]
        return self._rows([*pairs, *queries, []])

    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        n = self.pairs
        counter = self._clock * (n + 1) + self._count
        drawn = rng.random_bits(self.seed, rng.STREAM_WORLD, self._agent[:, None], counter)
        queries = 1 + self._randint(n, n, n + 1) if self._opening else n
        # One draw per key, in three independent parts: two orders and a value.
        order = _order(torch.stack([drawn >> 42, drawn >> 21], dim=1) & PART)
        value = ((drawn & PART) * self.values) >> PART.bit_length()
        rows = mask[:, None]
        self._keys = torch.where(rows, order.flatten(1), self._keys)
        self._value = torch.where(rows, value, self._value)
        self._queries = torch.where(mask, queries, self._queries)
        self._age = torch.where(mask, 0, self._age)

    def _key(self) -> Int[Tensor, " A"]:
        """Return the key that is shown or queried now."""
        t = self._age.clamp(max=2 * self.pairs - 1)[:, None]
        return self._keys.gather(1, t)[:, 0]

    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        right = actions == self._value.gather(1, self._key()[:, None])[:, 0]
        reward = (right & (self._age >= self.pairs)) / self._queries
        self._age = self._age + 1
        return Outcome(reward, self._age == self.pairs + self._queries)

    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        key = self._key()
        pair = key * self.values + self._value.gather(1, key[:, None])[:, 0]
        query = self.pairs * self.values + key
        over = self._age == self.pairs + self._queries
        view = torch.where(self._age < self.pairs, pair, query)
        return self._views[torch.where(over, len(self._views) - 1, view)]


def _order(drawn: Int[Tensor, "A k n"]) -> Int[Tensor, "A k n"]:
    """Return argsort(drawn); argsort itself cannot be captured in a CUDA graph."""
    index = torch.arange(drawn.shape[-1], device=drawn.device)
    # Unique, since the low bits are the index.
    unique = (drawn << MOST.bit_length()) | index
    rank = torch.zeros_like(drawn)
    for column in unique.split(1, dim=-1):
        rank += unique > column
    return torch.empty_like(rank).scatter_(-1, rank, index.expand_as(rank))
