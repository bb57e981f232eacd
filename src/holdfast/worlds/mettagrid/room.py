"""One simulation among many: its episodes, its rows of the buffer, and how it got to where it is."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError
from holdfast.saved import misfit, taken
from holdfast.worlds import draws
from holdfast.worlds.gym.numbered import FaultError, said
from holdfast.worlds.mettagrid import engine
from holdfast.worlds.mettagrid.game import Game

LONGEST = 100_000
"""Steps of an episode that are noted; one that goes on longer cannot be lived again."""
SEEDS = 1 << 31
"""Seeds below this are taken by the engine and by every map builder."""
OVERFLOW = "token budget"
"""What the engine says when tokens do not fit."""


@dataclass(frozen=True)
class Buffer:
    """What simulations write into and read from, a row an agent; all of them share one.

    Its columns are called as the engine calls them.
    """

    observations: np.ndarray
    terminals: np.ndarray
    truncations: np.ndarray
    rewards: np.ndarray
    masks: np.ndarray
    actions: np.ndarray
    vibe_actions: np.ndarray
    teacher_actions: np.ndarray

    @classmethod
    def of(cls, agents: int, tokens: int) -> "Buffer":
        """Make one for some agents."""
        flags = [np.zeros(agents, np.bool_) for _ in range(3)]
        seen, rewards = np.zeros((agents, tokens, 3), np.uint8), np.zeros(agents, np.float32)
        actions = [np.zeros(agents, np.int32) for _ in range(3)]
        return cls(seen, flags[0], flags[1], rewards, flags[2], *actions)

    def rows(self, start: int, count: int) -> "Buffer":
        """Look at some rows of it."""
        return Buffer(**{key: each[start : start + count] for key, each in vars(self).items()})


class Room:
    """A simulation, the episodes it plays, and a diary of the one that is played now.

    The seed of an episode is a pure function of (seed, number of the simulation, number of the episode), and
    so is its map. There is no reset in the engine: each episode is a new simulation over the same rows.
    """

    def __init__(self, game: Game, rows: Buffer, *, seed: int, number: int, actions: int) -> None:
        self.rows, self.number, self.episode = rows, number, -1
        self._game, self._seed = game, seed
        self._noted_as = np.min_scalar_type(actions - 1)
        self._limit = int(game.config.game.max_steps)
        self._simulation: Any = None
        self._steps = 0
        self._actions, self._lived = bytearray(), hashlib.blake2b(digest_size=16)

    def open(self, episode: int) -> None:
        """Begin an episode by its number."""
        self.close()
        self.episode, self._steps = episode, 0
        self._actions, self._lived = bytearray(), hashlib.blake2b(digest_size=16)
        who = torch.tensor(self.number)
        seed = int(draws.below(SEEDS, self._seed, draws.STREAM_WORLD, who, episode))
        simulator = engine.part(engine.SIMULATOR)
        self.rows.actions[:] = self.rows.vibe_actions[:] = 0
        buffers = simulator.Buffers(**vars(self.rows))
        try:
            self._simulation = simulator.Simulator().new_simulation(
                seeded(self._game, seed), seed, buffers=buffers
            )
        except Exception as error:
            raise self._fault("an episode cannot begin", error) from error
        self._note_seen()

    def step(self, actions: np.ndarray) -> tuple[bool, bool]:
        """Let the agents act, whose actions lie in the rows; say whether the episode is over, and cut off."""
        if self._steps < LONGEST:
            self._actions += actions.astype(self._noted_as).tobytes()
        self._steps += 1
        try:
            self._simulation.step()
        except Exception as error:
            raise self._fault("step() failed", error) from error
        self._note_seen()
        if not self._simulation.is_done():
            return False, False
        # Told apart by us: the engine calls its limit an end or not as it is configured, and every end that
        # its handlers decide a truncation.
        decided = "termination" in self._simulation._context
        return True, bool(self._limit and self._steps >= self._limit) and not decided

    def told(self) -> dict[str, Any]:
        """Say where the simulation is, by how it got there."""
        whole = self._steps <= LONGEST
        return {
            "episode": self.episode,
            "steps": self._steps,
            "actions": np.array(np.frombuffer(self._actions, np.uint8)) if whole else None,
            "lived": self._lived.hexdigest(),
        }

    def read(self, told: Mapping[str, Any]) -> np.ndarray | None:
        """Take the actions `[T,agents]` of what was told; None: it was too long."""
        noted, steps = taken(told, "actions", object), taken(told, "steps", int)
        for key, kind in (("episode", int), ("lived", str)):
            taken(told, key, kind)
        if noted is None:
            return None
        agents = len(self.rows.rewards)
        size = steps * agents * self._noted_as.itemsize
        if not isinstance(noted, np.ndarray) or noted.dtype != np.uint8 or noted.shape != (size,):
            raise misfit(f"'actions' of simulation {self.number} must be {size} bytes")
        return np.frombuffer(noted.tobytes(), self._noted_as).reshape(steps, agents)

    def close(self) -> None:
        """Let go of the simulation."""
        if self._simulation is not None:
            self._simulation.close()
            self._simulation = None

    def _note_seen(self) -> None:
        """Add all that was told to the digest of the episode."""
        rows = self.rows
        for column in (rows.observations, rows.rewards, rows.terminals, rows.truncations):
            self._lived.update(column.tobytes())

    def _fault(self, doing: str, error: Exception) -> FaultError:
        told = said(error)
        if OVERFLOW in told:
            now = self._game.config.game.obs.num_tokens
            told += f"; raise game.obs.num_tokens, now {now}"
        return FaultError(f"{doing}: {told}", self.number)


def seeded(game: Game, seed: int) -> Any:
    """Give the config of an episode: its map is drawn by the seed alone."""
    config = game.config
    maps = _with_seed(config.game.map_builder, seed) if game.draw_map is None else game.draw_map(seed)
    return config.model_copy(update={"game": config.game.model_copy(update={"map_builder": maps})})


def _with_seed(builder: Any, seed: int) -> Any:
    """Seed a map builder, and those inside it that would draw by chance.

    A builder that is used for several instances draws the same one for each; scenes draw by the seed of the
    builder they are in.
    """
    kind = engine.part("mettagrid.map_builder.map_builder").MapBuilderConfig
    inside = {}
    for place, (key, value) in enumerate(builder):
        if isinstance(value, kind):
            drawn, own = draws.seed_of(seed, draws.STREAM_PART, place), getattr(value, "seed", None)
            inside[key] = _with_seed(value, drawn if own is None else own)
    own = {"seed": seed} if "seed" in type(builder).model_fields else {}
    # Deep: builders change their own configs, and would change every episode after.
    return builder.model_copy(update={**inside, **own}, deep=True)


def require_repeatable(game: Game, name: str) -> None:
    """Refuse a map that has more places than agents and no seed to choose them by."""
    builder = game.config.game.map_builder
    if game.draw_map is not None or "seed" in type(builder).model_fields:
        return
    there = int(np.char.startswith(builder.create().build().grid.astype(str), "agent").sum())
    if there > game.config.game.num_agents:
        raise ConfigError(
            f"{name}: its map has {there} places for {game.config.game.num_agents} agents, and "
            f"{type(builder).__name__} has no seed to choose by; give as many places as agents."
        )
