"""Resume of one Gymnasium environment: its seed and actions are logged, and replayed on resume.

Gymnasium has no API to save the state of an environment. A run resumes bit for bit only if its environments
do, so `AgentEnv` logs what decides an episode (seed or generator, and every action) and replays it. A digest
of all outputs shows whether the replay is the same episode; if it is not, the agent starts a new one.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from holdfast.errors import error_text, located_error_text
from holdfast.state_tree import get_field, mismatch

MAX_LOGGED_ACTIONS = 100_000
"""Actions logged per episode; a longer episode cannot be replayed."""
CHUNK = 256
"""Actions collected in a list before they are packed into bytes."""
FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "seed": (int, type(None)),
    "before": (dict, type(None)),
    "actions": (np.ndarray, type(None)),
    "over": (bool,),
    "after": (dict, type(None)),
    "digest": (str,),
}
"""Fields of a saved episode log and their types; `before` and `after` are states of the env's generator."""
OUTCOME = struct.Struct("<d??")
"""Bytes of a reward and the two end flags in the digest."""


class EnvError(Exception):
    """An error of one environment, with its agent if known; the world adds its own name and the step."""

    def __init__(self, message: str, agent: int | None = None) -> None:
        super().__init__(message)
        self.message, self.agent = message, agent


def as_flag(name: str, value: Any) -> bool:
    """Return a flag of an environment as a bool; None or text would silently mean an end or none."""
    if isinstance(value, bool | int | np.generic | np.ndarray):
        return bool(value)
    raise TypeError(f"{name} is {value!r}; it must be True or False")


def _items(result: Any, *names: str) -> Any:
    """Return what `reset` or `step` returned, if it has as many items; the API of Gym had others."""
    if isinstance(result, tuple) and len(result) == len(names):
        return result
    what = f"{len(result)} values" if isinstance(result, tuple) else f"one {type(result).__name__}"
    raise TypeError(f"it returned {what}, not {', '.join(names)}")


def _reward(value: Any) -> float:
    """Return a reward as a float."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"reward is {value!r}; it must be a number") from None


def count_reasons(reasons: Sequence[str], unit: str) -> str:
    """List the distinct reasons for new episodes, each with its count; empty ones are left out."""
    counts = Counter(filter(None, reasons))
    return "; ".join(f"{reason} ({count} of {len(reasons)} {unit})" for reason, count in counts.items())


class EpisodeLog:
    """Log of the current episode: its seed, every action, and a digest of every output.

    An episode that starts without a seed is decided by the state of the env's generator before the reset.
    The digest covers all outputs, because the last observation alone need not show an earlier difference.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env, self._space = env.unwrapped, env.action_space
        self._max_bytes = MAX_LOGGED_ACTIONS * _action_bytes(self._space)
        # Copy arrays: the env may write into them.
        self._copies_actions = bool(self._space.shape)
        self.begin(None)

    def begin(self, seed: int | None) -> None:
        """Clear the log before a reset."""
        self._seed = seed
        self._before = self._generator_state() if seed is None else None
        self._packed: bytearray | None = bytearray()
        self._unpacked: list[Any] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self.over = False

    def add_action(self, action: Any) -> None:
        """Log an action before it is taken."""
        self._unpacked.append(action.copy() if self._copies_actions else action)
        if len(self._unpacked) == CHUNK:
            self._pack()

    def add_step(self, obs: Any, reward: float = 0.0, terminated: bool = False, truncated: bool = False) -> None:
        """Add the output of a reset or step to the digest."""
        self._digest.update(OUTCOME.pack(reward, terminated, truncated) + _obs_bytes(obs))
        self.over = terminated or truncated

    def _pack(self) -> None:
        if self._packed is not None:
            self._packed.extend(_encode_actions(self._unpacked, self._space))
            if len(self._packed) > self._max_bytes:
                self._packed = None
        self._unpacked.clear()

    def as_dict(self) -> dict[str, Any]:
        """Return the log as a saved state."""
        self._pack()
        return {
            "seed": self._seed,
            "before": self._before,
            "actions": None if self._packed is None else np.array(np.frombuffer(self._packed, np.uint8)),
            "over": self.over,
            "after": self._generator_state(),
            "digest": self._digest.hexdigest(),
        }

    def _generator_state(self) -> Mapping[str, Any] | None:
        generator = self._env.np_random
        return generator.bit_generator.state if isinstance(generator, np.random.Generator) else None


def _encode_actions(actions: list[Any], space: gymnasium.Space[Any]) -> bytes:
    # The shape is given, because the list may be empty.
    array = np.array(actions, space.dtype).reshape(-1, *(space.shape or ()))
    return (array - _start(space)).astype(_log_dtype(space)).tobytes()


def _decode_actions(packed: np.ndarray, space: gymnasium.Space[Any]) -> np.ndarray:
    array = np.frombuffer(packed.tobytes(), _log_dtype(space)).reshape(-1, *(space.shape or ()))
    return (array.astype(space.dtype) + _start(space)).astype(space.dtype)


def _action_bytes(space: gymnasium.Space[Any]) -> int:
    return _log_dtype(space).itemsize * math.prod(space.shape or ())


def _log_dtype(space: gymnasium.Space[Any]) -> np.dtype[Any]:
    """Return the dtype of logged actions: for discrete ones the smallest that counts them from 0."""
    if isinstance(space, spaces.Discrete):
        return np.min_scalar_type(int(space.n) - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return np.min_scalar_type(int(space.nvec.max()) - 1)
    return np.dtype(space.dtype)


def _start(space: gymnasium.Space[Any]) -> Any:
    return space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0


def require_episode_logs(states: Any, space: gymnasium.Space[Any], envs: int) -> list[dict[str, Any]]:
    """Check saved episode logs, one for each of `envs` environments with this action space."""
    if not isinstance(states, list) or len(states) != envs:
        raise mismatch(f"'envs' must be a list of {envs} environments")
    size = _action_bytes(space)
    for state in states:
        for key, types in FIELD_TYPES.items():
            value = get_field(state, key, object)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise mismatch(f"{key!r} of an environment is {type(value).__name__}")
        actions = state["actions"]
        if actions is not None and (
            actions.dtype != np.uint8
            or actions.ndim != 1
            or len(actions) % size
            or len(actions) > MAX_LOGGED_ACTIONS * size
        ):
            raise mismatch(
                f"'actions' of an environment are {list(actions.shape)} {actions.dtype}, must be uint8, "
                f"{size} each, of {MAX_LOGGED_ACTIONS:,} actions at most"
            )
    return states


def _obs_bytes(obs: Any) -> bytes:
    """Return bytes of any observation; whether it is in its space is checked elsewhere."""
    if isinstance(obs, np.ndarray):
        return obs.tobytes()
    if isinstance(obs, Mapping | tuple):
        return b"".join(map(_obs_bytes, obs.values() if isinstance(obs, Mapping) else obs))
    return repr(obs).encode()


def _equal(left: Any, right: Any) -> bool:
    """Compare two saved states, bit for bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return left == right


class AgentEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An environment whose episodes can be replayed; its errors become an `EnvError` with its agent, if it is of one.

    The last observation of an episode is copied, because the reset may overwrite it in place. Infos are
    dropped: no world reads them, and merging those of many environments is slow and may fail.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], agent: int | None = None) -> None:
        super().__init__(env)
        self.agent = agent
        self.obs: Any = None
        """The last observation, to find the env whose observation does not fit its space."""
        self._log = EpisodeLog(env)
        # The replayed episode is over: with next-step autoreset the next step is its reset.
        self._reset_pending = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; empty options become None, since autoreset modes differ in that."""
        self._reset_pending = False
        self._log.begin(seed)
        try:
            result = self.env.reset(seed=seed, options=options or None)
            self.obs, _ = _items(result, "observation", "info")
        except Exception as error:
            raise EnvError(f"reset() failed with {located_error_text(error)}", self.agent) from error
        self._log.add_step(self.obs)
        return self.obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment."""
        if self._reset_pending:
            return self.reset()[0], 0.0, False, False, {}
        self._log.add_action(action)
        try:
            result = _items(self.env.step(action), "observation", "reward", "terminated", "truncated", "info")
            self.obs, reward, terminated, truncated, _ = result
            # A plain bool needs no second look.
            terminated = terminated if terminated.__class__ is bool else as_flag("terminated", terminated)
            truncated = truncated if truncated.__class__ is bool else as_flag("truncated", truncated)
            reward = _reward(reward)
        except Exception as error:
            raise EnvError(f"step() failed with {located_error_text(error)}", self.agent) from error
        self._log.add_step(self.obs, reward, terminated, truncated)
        return deepcopy(self.obs) if terminated or truncated else self.obs, reward, terminated, truncated, {}

    def save(self) -> dict[str, Any]:
        """Return the log of the current episode."""
        return self._log.as_dict()

    def replay_episode(self, episode: dict[str, Any], fallback_seed: int) -> tuple[str, Any]:
        """Replay a saved episode; return ("", None), or (reason, first observation) of a new one.

        A new episode starts from `fallback_seed` if the replay raises or differs.
        """
        reason = self._replay(episode)
        if not reason:
            self._reset_pending = self._log.over
            return "", None
        return reason, self.reset(seed=fallback_seed)[0]

    def _replay(self, episode: dict[str, Any]) -> str:
        if episode["actions"] is None:
            return f"an episode of more than {MAX_LOGGED_ACTIONS:,} actions is not replayed"
        try:
            if episode["before"] is not None:
                self.unwrapped.np_random.bit_generator.state = episode["before"]
            self.reset(seed=episode["seed"])
            for action in _decode_actions(episode["actions"], self.env.action_space):
                if self._log.over:
                    return "the replayed episode ends earlier: it depends on more than seed and actions"
                self.step(action)
        except Exception as error:
            return f"its episode cannot be replayed: {error_text(error)}"
        if _equal(self.save(), episode):
            return ""
        return "the replayed episode differs: it depends on more than seed and actions"
