"""A diary of one environment's episode, so that it can be lived again."""

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from holdfast.saved import misfit, taken

LONGEST = 100_000
"""Actions of an episode that are noted; one that goes on longer cannot be lived again."""
SHEET = 256
"""Actions that are noted loosely before they are written down as bytes."""
KINDS: dict[str, tuple[type, ...]] = {
    "seed": (int, type(None)),
    "before": (dict, type(None)),
    "actions": (np.ndarray, type(None)),
    "over": (bool,),
    "after": (dict, type(None)),
    "lived": (str,),
}
"""What stands in a diary, and of what kind it is."""
JUDGED = struct.Struct("<d??")
"""How a reward and the two flags of an end are written down."""


class Diary:
    """Notes what an episode began with, every action since, and a digest of all that was told.

    An episode that opens without a seed is decided by where the environment's generator was before. What was
    shown once may decide all that follows, and may not be seen in what is shown last: so all of it counts.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._bare, self._space = env.unwrapped, env.action_space
        self._room = LONGEST * bytes_of_action(self._space)
        # Arrays may be changed by who they are given to; numbers cannot.
        self._copies = bool(self._space.shape)
        self.begin(None)

    def begin(self, seed: int | None) -> None:
        """Begin a page: an episode is about to open."""
        self._seed = seed
        self._before = self.generator() if seed is None else None
        self._actions: bytearray | None = bytearray()
        self._loose: list[Any] = []
        self._lived = hashlib.blake2b(digest_size=16)
        self.over = False

    def note(self, action: Any) -> None:
        """Note an action that is about to be taken."""
        self._loose.append(action.copy() if self._copies else action)
        if len(self._loose) == SHEET:
            self._bind()

    def saw(self, seen: Any, reward: float = 0.0, ended: tuple[bool, bool] = (False, False)) -> None:
        """Add what the environment told to the digest of its episode."""
        self._lived.update(JUDGED.pack(reward, *ended) + bytes_of(seen))
        self.over = True in ended

    def _bind(self) -> None:
        """Write loose actions down as bytes, which take less room."""
        noted = self._actions
        if noted is not None:
            noted.extend(counted(self._loose, self._space).tobytes())
            if len(noted) > self._room:
                self._actions = None
        self._loose.clear()

    def told(self) -> dict[str, Any]:
        """Say all that is noted, and where the generator is."""
        self._bind()
        actions = self._actions
        return {
            "seed": self._seed,
            "before": self._before,
            "actions": None if actions is None else np.array(np.frombuffer(actions, np.uint8)),
            "over": self.over,
            "after": self.generator(),
            "lived": self._lived.hexdigest(),
        }

    def generator(self) -> Mapping[str, Any] | None:
        """Say where the environment's generator is, if it has one that can be told."""
        found = self._bare.np_random
        return found.bit_generator.state if isinstance(found, np.random.Generator) else None

    def set_generator(self, state: Mapping[str, Any]) -> None:
        """Put the environment's generator back."""
        self._bare.np_random.bit_generator.state = state


def counted(actions: list[Any], space: gymnasium.Space[Any]) -> np.ndarray:
    """Write actions as they are noted: choices are counted from 0."""
    # Of none, too, the shape must be told.
    array = np.array(actions, space.dtype).reshape(-1, *(space.shape or ()))
    return (array - first_of(space)).astype(kept_as(space))


def actions_in(noted: np.ndarray, space: gymnasium.Space[Any]) -> np.ndarray:
    """Read the actions of a diary: an array of them."""
    noted_as = np.frombuffer(noted.tobytes(), kept_as(space)).reshape(-1, *(space.shape or ()))
    return (noted_as.astype(space.dtype) + first_of(space)).astype(space.dtype)


def bytes_of_action(space: gymnasium.Space[Any]) -> int:
    """Say how many bytes an action takes."""
    return kept_as(space).itemsize * math.prod(space.shape or ())


def kept_as(space: gymnasium.Space[Any]) -> np.dtype[Any]:
    """Say as what an action is noted: choices as the smallest numbers that count them all from 0."""
    if isinstance(space, spaces.Discrete):
        return np.min_scalar_type(int(space.n) - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return np.min_scalar_type(int(space.nvec.max()) - 1)
    return np.dtype(space.dtype)


def first_of(space: gymnasium.Space[Any]) -> Any:
    """Say from where choices are counted; of what is no choice, 0."""
    return space.start if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else 0


def require_diary(told: Any, space: gymnasium.Space[Any]) -> None:
    """Refuse what no diary says."""
    for key, kinds in KINDS.items():
        found = taken(told, key, object)
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            raise misfit(f"{key!r} of an environment is {type(found).__name__}")
    actions = told["actions"]
    if actions is None:
        return
    size = bytes_of_action(space)
    if actions.dtype != np.uint8 or actions.ndim != 1 or len(actions) % size or len(actions) > LONGEST * size:
        raise misfit(
            f"'actions' of an environment are {list(actions.shape)} {actions.dtype}, must be uint8, "
            f"{size} each, of {LONGEST:,} actions at most"
        )


def bytes_of(seen: Any) -> bytes:
    """Write down what is seen, whatever it is: whether it fits its space is looked at elsewhere."""
    if isinstance(seen, np.ndarray):
        return seen.tobytes()
    if isinstance(seen, Mapping):
        return b"".join(bytes_of(each) for each in seen.values())
    if isinstance(seen, tuple):
        return b"".join(bytes_of(each) for each in seen)
    return repr(seen).encode()


def same(one: Any, other: Any) -> bool:
    """Say whether two plain trees are equal, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return one == other
