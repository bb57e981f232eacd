"""envpool's environments by number: actions go in, and those come out that are done first."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from gymnasium import spaces

from holdfast.errors import ConfigError, did_you_mean
from holdfast.shapes import Tensor
from holdfast.worlds.gym.find import import_for
from holdfast.worlds.gym.numbered import said
from holdfast.worlds.seen import nothing_seen

DOOR = "envpool:"
TYPED_ELSEWHERE = {
    "num_envs": "world.agents",
    "batch_size": "world.batch",
    "num_threads": "world.threads",
    "seed": "seed",
    "env_seed": "seed",
}
"""What a pool is made with that has a key of its own."""


@dataclass(frozen=True)
class Batch:
    """What some environments told, a row each."""

    rows: np.ndarray
    obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Pool:
    """So many environments of one kind, received all at once, or in turns of up to `batch`.

    envpool hands out whole batches only: who waits for the last few would wait forever. So for turns
    there are `batch - 1` more environments that nobody sees, which act when fewer than a batch are on their
    way.
    """

    def __init__(
        self,
        env: str,
        envs: int,
        *,
        batch: int | None = None,
        threads: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.envs, self.batch = f"{DOOR}{env}", envs, batch or envs
        self._spares = batch - 1 if batch else 0
        self._options = {"num_threads": threads, **_own_options(self.name, options or {})}
        self._id, self._made = env, cast("Any", None)
        self._package = import_for("", "envpool", DOOR.removesuffix(":"))
        known = self._package.list_all_envs()
        if env not in known:
            meant = did_you_mean(env, known, f"it has {len(known):,}; envpool.list_all_envs() lists them.")
            raise ConfigError(f"{self.name}: envpool has no such environment; {meant}")
        self._busy = np.zeros(envs + self._spares, np.bool_)
        """Whose answer is on its way; those that nobody sees come last."""
        self.open(range(envs))

    @property
    def busy(self) -> np.ndarray:
        """Say whose answer is on its way."""
        return self._busy[: self.envs]

    def open(self, seeds: Sequence[int]) -> None:
        """Make all environments anew, each from its seed, and let their first episodes begin."""
        self.close()
        # What nobody sees needs no seed of its own, but envpool wants as many as there are.
        every = [*seeds, *range(self._spares)]
        options = {"num_envs": len(every), "batch_size": self.batch, "seed": every, **self._options}
        try:
            self._made = self._package.make_gymnasium(self._id, **options)
        except Exception as error:
            raise ConfigError(f"{self.name} cannot be made: {said(error)}") from error
        if self._made.config["max_num_players"] != 1:
            raise ConfigError(f"{self.name} has several players; only environments of one can be lived in.")
        with warnings.catch_warnings():
            # The bounds of what is seen are told in more digits than it has.
            warnings.filterwarnings("ignore", message=".*precision lowered")
            self.sight, self.act = self._made.observation_space, self._made.action_space
        self._made.async_reset()
        self._busy[:] = True

    def send(self, rows: np.ndarray, actions: np.ndarray) -> None:
        """Let some environments act."""
        self._made.send(actions, rows.astype(np.int32))
        self._busy[rows] = True

    def receive(self) -> Batch:
        """Wait for some of those that act, at least one and at most a batch."""
        while True:
            self._let_spares_act()
            obs, *judged, info = self._made.recv()
            ids = np.asarray(info["env_id"])
            self._busy[ids] = False
            seen = ids < self.envs
            if seen.any():
                reward, terminated, truncated = (np.array(column)[seen] for column in judged)
                rows = ids[seen].astype(np.int64)
                return Batch(rows, _those(obs, seen), reward, terminated, truncated)

    def close(self) -> None:
        """End the threads."""
        if self._made is not None:
            self._made.close()
        self._made = cast("Any", None)

    def _let_spares_act(self) -> None:
        missing = self.batch - int(self._busy.sum())
        if missing > 0:
            idle = self.envs + (~self._busy[self.envs :]).nonzero()[0][:missing]
            self.send(idle, _resting(self.act).repeat(len(idle), axis=0))


def _own_options(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    for key, ours in TYPED_ELSEWHERE.items():
        if key in options:
            raise ConfigError(f"{name}: world.options has {key}; write {ours}={options[key]} instead.")
    return dict(options)


def _resting(space: Any) -> np.ndarray:
    """Make an action of somebody whom nobody sees: the first choice, or no movement."""
    still = cast("Tensor", nothing_seen(space, 1)).numpy()
    return still.clip(space.low, space.high) if isinstance(space, spaces.Box) else still


def _those(obs: Any, which: np.ndarray) -> Any:
    """Pick rows of what is seen, in all its parts."""
    if isinstance(obs, Mapping):
        return {key: _those(part, which) for key, part in obs.items()}
    return np.asarray(obs)[which]
