"""One mettagrid simulation with its episodes, and the translation of its tokens into named features."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from mettagrid.config.vibes import VIBES
from mettagrid.map_builder.map_builder import MapBuilderConfig
from mettagrid.simulator.simulator import Buffers, Simulator

from holdfast import rng
from holdfast.errors import ConfigError, error_text
from holdfast.state_tree import get_field, mismatch
from holdfast.worlds.gym.episode_log import EnvError
from holdfast.worlds.gym.gym_world import SEEDS
from holdfast.worlds.mettagrid.games import Game
from holdfast.worlds.step import Feature
from holdfast.worlds.tensor_world import FULL
from holdfast.worlds.tokens import PADDING

MAX_LOGGED_STEPS = 100_000
"""Steps logged per episode; a longer episode cannot be replayed."""
OVERFLOW = "token budget"
"""Part of the engine's message when an observation has too many tokens."""


def new_buffers(agents: int, tokens: int) -> Buffers:
    """Allocate the arrays that simulations read and write, one row per agent."""
    return Buffers(
        observations=np.zeros((agents, tokens, 3), np.uint8),
        terminals=np.zeros(agents, np.bool_),
        truncations=np.zeros(agents, np.bool_),
        rewards=np.zeros(agents, np.float32),
        masks=np.zeros(agents, np.bool_),
        actions=np.zeros(agents, np.int32),
        vibe_actions=np.zeros(agents, np.int32),
        teacher_actions=np.zeros(agents, np.int32),
    )


def select_rows(buffers: Buffers, start: int, count: int) -> Buffers:
    """Return a view of some rows of the buffers."""
    return Buffers(**{key: array[start : start + count] for key, array in vars(buffers).items()})


class Simulation:
    """A simulation, its episodes, and a log of the current one.

    The seed and the map of an episode depend on (seed, simulation, episode) alone. The engine has no reset:
    each episode is a new simulation over the same rows.
    """

    def __init__(self, game: Game, rows: Any, seed: int, actions: int) -> None:
        self.rows, self.number, self.episode = rows, 0, -1
        self._game, self._seed = game, seed
        self._log_dtype = np.min_scalar_type(actions - 1)
        self._limit = int(game.config.game.max_steps)
        self._simulation: Any = None
        self._steps = 0
        self._actions, self._digest = bytearray(), hashlib.blake2b(digest_size=16)

    def open(self, episode: int) -> None:
        """Start an episode by its number."""
        self.close()
        self.episode, self._steps = episode, 0
        self._actions, self._digest = bytearray(), hashlib.blake2b(digest_size=16)
        seed = int(rng.randint(SEEDS, self._seed, rng.STREAM_WORLD, torch.tensor(self.number), episode))
        self.rows.actions[:] = self.rows.vibe_actions[:] = 0
        try:
            config = _episode_config(self._game, seed)
            self._simulation = Simulator().new_simulation(config, seed, buffers=self.rows)
        except Exception as error:
            raise self._error("an episode cannot start", error) from error
        self._log_outputs()

    def step(self, actions: np.ndarray) -> tuple[bool, bool]:
        """Step with the actions in the rows; return whether the episode ended, and whether by its limit."""
        if self._steps < MAX_LOGGED_STEPS:
            self._actions += actions.astype(self._log_dtype).tobytes()
        self._steps += 1
        try:
            self._simulation.step()
        except Exception as error:
            raise self._error("step() failed", error) from error
        self._log_outputs()
        if not self._simulation.is_done():
            return False, False
        # Not by the engine's flags: it reports its limit as termination or truncation as configured, and
        # every end that its handlers cause as truncation.
        terminated = "termination" in self._simulation._context
        return True, bool(self._limit and self._steps >= self._limit) and not terminated

    def state(self) -> dict[str, Any]:
        """Return the log of the current episode."""
        is_logged = self._steps <= MAX_LOGGED_STEPS
        return {
            "episode": self.episode,
            "steps": self._steps,
            "actions": np.array(np.frombuffer(self._actions, np.uint8)) if is_logged else None,
            "digest": self._digest.hexdigest(),
        }

    def logged_actions(self, state: Mapping[str, Any]) -> np.ndarray | None:
        """Check a saved log and return its actions `[T,agents]`; None: the episode was too long."""
        packed, steps = get_field(state, "actions", object), get_field(state, "steps", int)
        get_field(state, "episode", int)
        get_field(state, "digest", str)
        if packed is None:
            return None
        agents = len(self.rows.rewards)
        size = steps * agents * self._log_dtype.itemsize
        if not isinstance(packed, np.ndarray) or packed.dtype != np.uint8 or packed.shape != (size,):
            raise mismatch(f"'actions' of simulation {self.number} must be {size} bytes")
        return np.frombuffer(packed.tobytes(), self._log_dtype).reshape(steps, agents)

    def object_kinds(self) -> list[str]:
        """Return the names of the kinds of objects, agents excepted."""
        return [name for name in self._simulation.object_type_names if name and not name.startswith("agent")]

    def grid_view(self, kinds: Sequence[str], agents: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the kind of each cell, and row and column of each agent."""
        cells = np.zeros((self._simulation.map_height, self._simulation.map_width), np.int64)
        places = np.full((agents, 2), -1)
        for thing in self._simulation.grid_objects().values():
            if "agent_id" in thing:
                # Column, then row.
                places[thing["agent_id"]] = thing["location"][::-1]
            else:
                cells[thing["location"][::-1]] = kinds.index(thing["type_name"])
        return cells, places

    def close(self) -> None:
        """Close the simulation."""
        if self._simulation is not None:
            self._simulation.close()
            self._simulation = None

    def _log_outputs(self) -> None:
        rows = self.rows
        for column in (rows.observations, rows.rewards, rows.terminals, rows.truncations):
            self._digest.update(column.tobytes())

    def _error(self, failure: str, error: Exception) -> EnvError:
        message = error_text(error)
        if OVERFLOW in message:
            message += f"; raise game.obs.num_tokens, now {self._game.config.game.obs.num_tokens}"
        return EnvError(f"{failure}: {message}", self.number)


def _episode_config(game: Game, seed: int) -> Any:
    """Return the config of an episode, with the map of its seed."""
    config = game.config
    maps = _with_seed(config.game.map_builder, seed) if game.draw_map is None else game.draw_map(seed)
    return config.model_copy(update={"game": config.game.model_copy(update={"map_builder": maps})})


def _with_seed(builder: Any, seed: int) -> Any:
    """Return a map builder with a seed, also for nested builders that have none.

    A builder used for several instances makes the same map for each; scenes use the seed of their builder.
    """
    update: dict[str, Any] = {}
    for index, (key, value) in enumerate(builder):
        if isinstance(value, MapBuilderConfig):
            nested_seed = getattr(value, "seed", None)
            if nested_seed is None:
                nested_seed = rng.derive_seed(seed, rng.STREAM_PART, index)
            update[key] = _with_seed(value, nested_seed)
    if "seed" in type(builder).model_fields:
        update["seed"] = seed
    # Deep: builders modify their config, which would change later episodes.
    return builder.model_copy(update=update, deep=True)


def require_repeatable(game: Game, name: str) -> None:
    """Reject a map with more spawn points than agents and no seed to choose them by."""
    builder = game.config.game.map_builder
    if game.draw_map is not None or "seed" in type(builder).model_fields:
        return
    spawns = int(np.char.startswith(builder.create().build().grid.astype(str), "agent").sum())
    if spawns > game.config.game.num_agents:
        raise ConfigError(
            f"{name}: its map has {spawns} spawn points for {game.config.game.num_agents} agents, and "
            f"{type(builder).__name__} has no seed to choose by; give as many spawn points as agents."
        )


IGNORED = ("last_reward", "goal")
"""Features without information: the engine writes observations before rewards, so `last_reward` is always 0;
`goal` has an id and is never written."""
UNKNOWN = 254
"""Feature of a token that the config does not define."""
MAX_WINDOW = 15


class Vocabulary:
    """Translates the engine's tokens into features with names.

    Feature ids depend on the config, names do not. Values of tags, actions and vibes are ids, too: each
    becomes a feature of its own, `tag:NAME`, with a full value. Vibes keep their values if the list is the
    engine's default, which is the same in all configs.

    `agent_id` is ignored unless requested: a network could memorize an answer per agent with it.
    """

    def __init__(self, game: Any, name: str, *, agent_id: bool) -> None:
        ids = game.id_map()
        self.features: list[Feature] = []
        self._table = np.full((256, 256), UNKNOWN << 8, np.uint16)
        self._table[PADDING] = PADDING << 8 | PADDING
        default_vibes = [vibe.name for vibe in VIBES]
        expanded = {
            "tag": ids.tag_names(),
            "last_action": action_names(game),
            "vibe": game.vibe_names if game.vibe_names != default_vibes else (),
        }
        disabled = _disabled_features(game.obs.global_obs)
        for feature in ids.features():
            if feature.id >= UNKNOWN:
                raise ConfigError(f"{name} has {feature.id + 1} features; tokens can name {UNKNOWN}.")
            if feature.name in IGNORED or (feature.name == "agent_id" and not agent_id):
                self._table[feature.id] = PADDING << 8 | PADDING
            elif feature.name in disabled:
                continue
            elif expanded.get(feature.name):
                self._expand(feature.id, feature.name, expanded[feature.name])
            else:
                self._table[feature.id] = len(self.features) << 8 | np.arange(256)
                self.features.append(Feature(feature.name, float(feature.normalization)))
        if len(self.features) > UNKNOWN:
            sizes = ", ".join(f"{len(names)} of {kind}" for kind, names in expanded.items())
            raise ConfigError(
                f"{name} has {len(self.features)} features with {sizes}; tokens can name {UNKNOWN}. Use "
                "fewer vibes (game.actions.change_vibe.vibes), or game.obs.global_obs.last_action=False."
            )

    def _expand(self, feature_id: int, kind: str, names: Sequence[str]) -> None:
        for value, name in enumerate(names[:256]):
            self._table[feature_id, value] = len(self.features) % 256 << 8 | FULL
            self.features.append(Feature(f"{kind}:{name}", float(FULL)))

    def translate(self, raw: np.ndarray) -> np.ndarray:
        """Translate tokens `[N,M,3]`; ignored ones become padding, and padding comes last."""
        tokens = np.full_like(raw, PADDING)
        used = raw[..., 0] != PADDING
        longest = int(used.sum(1).max()) if used.any() else 0
        if not longest:
            return tokens
        raw = raw[:, :longest]
        location, word = raw[..., 0].copy(), self._table[raw[..., 1], raw[..., 2]]
        ignored = (word >> 8 == PADDING) | ~used[:, :longest]
        location[ignored], word[ignored] = PADDING, PADDING << 8 | PADDING
        order = np.argsort(ignored, axis=1, kind="stable")
        for byte, column in enumerate((location, word >> 8, word & 255)):
            tokens[:, :longest, byte] = np.take_along_axis(column, order, 1)
        return tokens

    def unknown(self, tokens: np.ndarray) -> np.ndarray | None:
        """Return `[row, token]` of the first token that the config does not define, if any."""
        mask = (tokens[..., 1] == UNKNOWN) & (tokens[..., 0] != PADDING)
        return np.argwhere(mask)[0] if mask.any() else None


def action_names(game: Any) -> tuple[str, ...]:
    """Return the action names in the engine's order, vibes last."""
    return tuple(action.name for action in game.actions.actions())


def window_of(game: Any, name: str) -> tuple[int, int]:
    """Return rows and columns of the observation window; a location byte holds up to 15 of each."""
    window = int(game.obs.height), int(game.obs.width)
    if max(window) > MAX_WINDOW:
        raise ConfigError(
            f"{name} has a window of {window[0]}x{window[1]} cells; set game.obs.height and width to "
            f"{MAX_WINDOW} at most."
        )
    return window


def _disabled_features(config: Any) -> set[str]:
    """Return features that have an id but are never written, so that no network has inputs for them."""
    disabled = {name for name in ("episode_completion_pct", "last_action") if not getattr(config, name)}
    if config.local_position:
        return disabled
    return disabled | {f"lp:{direction}" for direction in ("east", "west", "north", "south")}
