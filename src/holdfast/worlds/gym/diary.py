"""A diary of one environment's episode, so that it can be lived again."""

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from holdfast.saved import misfit, taken

LONGEST = 100_000
"""Actions of an episode that are noted; one that goes on longer cannot be lived again."""
SHEET = 256
"""Actions that are noted loosely before they are written down as bytes."""
KINDS: dict[str, tuple[type, ...]] = {
    "seed": (int, type(None)),
    "before": (dict, type(None)),
    "actions": (np.ndarray, type(None)),
    "paid": (float,),
    "over": (bool,),
    "after": (dict, type(None)),
    "seen": (np.ndarray, dict, list),
}
"""What stands in a diary, and of what kind it is."""


class Diary:
    """Notes what an episode began with, and every action since.

    An episode that opens without a seed is decided by where the environment's generator was before.
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
        self.paid, self.over = 0.0, False

    def note(self, action: Any) -> None:
        """Note an action that is about to be taken."""
        self._loose.append(action.copy() if self._copies else action)
        if len(self._loose) == SHEET:
            self._bind()

    def _bind(self) -> None:
        """Write loose actions down as bytes, which take less room."""
        if self._actions is not None:
            self._actions += np.array(self._loose, self._space.dtype).tobytes()
            if len(self._actions) > self._room:
                self._actions = None
        self._loose.clear()

    def told(self, seen: Any) -> dict[str, Any]:
        """Say all that is noted, with what is seen now and where the generator is."""
        self._bind()
        actions = self._actions
        return {
            "seed": self._seed,
            "before": self._before,
            "actions": None if actions is None else np.array(np.frombuffer(actions, np.uint8)),
            "paid": self.paid,
            "over": self.over,
            "after": self.generator(),
            "seen": plain(seen),
        }

    def generator(self) -> Mapping[str, Any] | None:
        """Say where the environment's generator is, if it has one that can be told."""
        found = self._bare.np_random
        return found.bit_generator.state if isinstance(found, np.random.Generator) else None

    def set_generator(self, state: Mapping[str, Any]) -> None:
        """Put the environment's generator back."""
        self._bare.np_random.bit_generator.state = state


def actions_in(noted: np.ndarray, space: gymnasium.Space[Any]) -> np.ndarray:
    """Read the actions of a diary: an array of them."""
    return np.frombuffer(noted.tobytes(), space.dtype).reshape(-1, *(space.shape or ())).copy()


def bytes_of_action(space: gymnasium.Space[Any]) -> int:
    """Say how many bytes an action takes."""
    return np.dtype(space.dtype).itemsize * math.prod(space.shape or ())


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
            f"'actions' of an environment are {list(actions.shape)} {actions.dtype}; one is {size} bytes"
        )


def plain(seen: Any) -> Any:
    """Copy what is seen as a plain tree of arrays."""
    if isinstance(seen, Mapping):
        return {str(key): plain(each) for key, each in seen.items()}
    if isinstance(seen, tuple):
        return [plain(each) for each in seen]
    return np.array(seen)


def same(one: Any, other: Any) -> bool:
    """Say whether two plain trees are equal, bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return (one.shape, one.dtype) == (other.shape, other.dtype) and one.tobytes() == other.tobytes()
    return one == other
