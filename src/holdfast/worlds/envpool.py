"""EnvpoolWorld: environments of envpool by id, stepped synchronously or asynchronously."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, cast

import numpy as np
import torch
from gymnasium import spaces

from holdfast import rng
from holdfast.errors import ConfigError, ContractError, did_you_mean, error_text
from holdfast.registry import load_module
from holdfast.state_tree import get_field, require_equal
from holdfast.types import Int, Shaped, Tensor
from holdfast.worlds.gym.episode_log import EnvError
from holdfast.worlds.gym.gym_world import SEEDS, episode_starts
from holdfast.worlds.gym.spaces import ActionConverter, ObsConverter, external_spec, external_step
from holdfast.worlds.obs import zero_obs
from holdfast.worlds.previous_inputs import ExternalWorld
from holdfast.worlds.step import Device, PartialStep, Restarted, Step, World, concat

PREFIX = "envpool:"
RESERVED_OPTIONS = {
    "num_envs": "world.agents",
    "batch_size": "world.batch",
    "num_threads": "world.threads",
    "seed": "seed",
    "env_seed": "seed",
}
"""Options of envpool that have their own config key."""


class EnvpoolEnvs:
    """Environments of one kind, received all at once, or in batches of up to `batch`.

    envpool returns full batches only, so the last few environments would never be returned. With `batch`
    there are `batch - 1` padding environments, which step when fewer than a batch are busy.
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
        self.name, self.envs, self.batch = f"{PREFIX}{env}", envs, batch or envs
        self._padding = self.batch - 1 if batch else 0
        for key, value in (options or {}).items():
            if key in RESERVED_OPTIONS:
                config_key = RESERVED_OPTIONS[key]
                raise ConfigError(f"{self.name}: world.options has {key}; write {config_key}={value} instead.")
        self._options = {"num_threads": threads, **(options or {})}
        self._id, self._pool = env, cast("Any", None)
        self._package = load_module("", "envpool", PREFIX.removesuffix(":"))
        ids = self._package.list_all_envs()
        if env not in ids:
            hint = did_you_mean(env, ids, f"it has {len(ids):,}; envpool.list_all_envs() lists them.")
            raise ConfigError(f"{self.name}: envpool has no such environment; {hint}")
        # Environments that have not returned their step; padding comes last.
        self._busy = np.zeros(envs + self._padding, np.bool_)
        self.open(range(envs))

    @property
    def busy(self) -> np.ndarray:
        """Environments that have not returned their step."""
        return self._busy[: self.envs]

    def open(self, seeds: Sequence[int]) -> None:
        """Make all environments again, each from its seed, and reset them."""
        self.close()
        # envpool takes one seed per environment, also for padding.
        every_seed = [*seeds, *range(self._padding)]
        options = {"num_envs": len(every_seed), "batch_size": self.batch, "seed": every_seed, **self._options}
        try:
            self._pool = self._package.make_gymnasium(self._id, **options)
        except Exception as error:
            raise ConfigError(f"{self.name} cannot be made: {error_text(error)}") from error
        if self._pool.config["max_num_players"] != 1:
            raise ConfigError(f"{self.name} has several players; only single-player environments work.")
        with warnings.catch_warnings():
            # The bounds of the observation space are given in float64.
            warnings.filterwarnings("ignore", message=".*precision lowered")
            self.observation_space, self.action_space = self._pool.observation_space, self._pool.action_space
        self._pool.async_reset()
        self._busy[:] = True

    def send(self, rows: np.ndarray, actions: np.ndarray) -> None:
        """Start the step of some environments."""
        self._pool.send(actions, rows.astype(np.int32))
        self._busy[rows] = True

    def receive(self) -> tuple[np.ndarray, Any, np.ndarray, np.ndarray, np.ndarray]:
        """Wait for at least one busy environment and at most a batch.

        Return their numbers, observations, rewards, terminated and truncated, one row each.
        """
        while True:
            missing = self.batch - int(self._busy.sum())
            if missing > 0:
                idle = self.envs + (~self._busy[self.envs :]).nonzero()[0][:missing]
                self.send(idle, _no_op(self.action_space).repeat(len(idle), axis=0))
            obs, *columns, info = self._pool.recv()
            ids = np.asarray(info["env_id"])
            self._busy[ids] = False
            mask = ids < self.envs
            if mask.any():
                reward, terminated, truncated = (np.array(column)[mask] for column in columns)
                return ids[mask].astype(np.int64), _select_rows(obs, mask), reward, terminated, truncated

    def close(self) -> None:
        """Stop the threads."""
        if self._pool is not None:
            self._pool.close()
        self._pool = cast("Any", None)


def _no_op(space: Any) -> np.ndarray:
    """Return a no-op action for padding environments."""
    zeros = cast("Tensor", zero_obs(space, 1)).numpy()
    return zeros.clip(space.low, space.high) if isinstance(space, spaces.Box) else zeros


def _select_rows(obs: Any, mask: np.ndarray) -> Any:
    if isinstance(obs, Mapping):
        return {key: _select_rows(entry, mask) for key, entry in obs.items()}
    return np.asarray(obs)[mask]


class EnvpoolWorld:
    """One environment per agent, in threads of this process; all are stepped at once.

    envpool resets in the next step: the row in which an episode ends has the final observation and is not
    `valid`; the next row is `first`. Agent i's environment is seeded by (seed, i) alone.
    """

    def __init__(self, envs: EnvpoolEnvs, *, seed: int = 0, device: Device = "cpu", keep: Sequence[int] = ()) -> None:
        self.name, self.agents, self.seed, self._envs = envs.name, envs.envs, seed, envs
        self.device = torch.device(device)
        self._obs_converter = ObsConverter(envs.observation_space, self.name, keep)
        self._action_converter = ActionConverter(envs.action_space, self.name)
        self.spec = external_spec(self.name, self._obs_converter, self._action_converter)
        self._ended = np.zeros(self.agents, np.bool_)
        # Steps received by each agent since the environments were opened, without the reset.
        self._clocks = np.full(self.agents, -1)

    def reset(self) -> Step:
        """Start every agent's first episode, the same one each time."""
        return self._open(0)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Step all environments and wait for them."""
        self.send(torch.arange(self.agents), actions)
        return self._receive_all()

    def send(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Start the step of some agents, without waiting."""
        if self._clocks.min() < 0:
            raise ContractError("Call reset() before the first step().")
        busy = rows[torch.from_numpy(self._envs.busy[rows.numpy()])]
        if len(busy):
            raise ContractError(f"{self.name}: agent {int(busy[0])} is still stepping; call recv() before send().")
        self._envs.send(rows.numpy(), self._action_converter.write(actions, len(rows)))

    def state(self) -> dict[str, Any]:
        """Return the seed and the number of steps; envpool cannot save its environments."""
        if self._clocks.min() < 0:
            raise ContractError("Call reset() before state().")
        return {"seed": self.seed, "steps": int(self._clocks.sum())}

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Start a new episode of every agent, from seeds that were not used yet."""
        require_equal(state, "seed", self.seed)
        step = self._open(1 + get_field(state, "steps", int))
        return Restarted(torch.ones_like(step.first), step, f"{self.name} cannot save the state of its environments")

    def close(self) -> None:
        """Stop the threads."""
        self._envs.close()

    def _open(self, clock: int) -> Step:
        agents = torch.arange(self.agents)
        self._envs.open(rng.randint(SEEDS, self.seed, rng.STREAM_WORLD, agents, clock).tolist())
        self._clocks[:] = -1
        return self._receive_all()

    def _receive_all(self) -> Step:
        steps = [self._receive()]
        while self._envs.busy.any():
            steps.append(self._receive())
        return concat(steps)

    def _receive(self) -> PartialStep:
        if not self._envs.busy.any():
            raise ContractError(f"{self.name}: no agent is stepping; call send() before recv().")
        rows, batch, reward, terminated, truncated = self._envs.receive()
        self._clocks[rows] += 1
        with self._error_context(rows):
            obs = self._obs_converter.read(batch, rows.tolist())
            ended = terminated | truncated
            first = (self._clocks[rows] == 0) | episode_starts(self._ended[rows], ended, rows)
        self._ended[rows] = ended
        reward = np.where(first, 0, reward).astype(np.float32)
        step = external_step(obs, obs, self.device, reward, terminated, truncated, first, ~ended)
        return PartialStep(torch.from_numpy(rows), step)

    @contextmanager
    def _error_context(self, rows: np.ndarray) -> Iterator[None]:
        """Turn an EnvError into a ContractError with the agent and the step."""
        try:
            yield
        except EnvError as error:
            agent = int(rows[0]) if error.agent is None else error.agent
            where = f"agent {agent}, step {self._clocks[agent]}"
            raise ContractError(f"{self.name}, {where}: {error.message}.") from error.__cause__


class EnvpoolAsyncWorld(EnvpoolWorld):
    """EnvpoolWorld with `recv`: the agents that finish first act again while the rest still step.

    Every agent gets the same episodes as in synchronous stepping.
    """

    def __init__(self, envs: EnvpoolEnvs, **options: Any) -> None:
        super().__init__(envs, **options)
        self.groups: tuple[Int[Tensor, " N"], ...] = torch.arange(self.agents).split(envs.batch)

    def recv(self) -> PartialStep:
        """Wait for at least one agent that was sent an action and at most a batch."""
        return self._receive()


def envpool_world(
    agents: int,
    *,
    env: str,
    seed: int = 0,
    device: Device = "cpu",
    vector: Literal["sync", "async"] = "sync",
    batch: int = 0,
    threads: int = 0,
    options: Mapping[str, Any] | None = None,
    keep: Sequence[int] = (),
    previous_action: bool = False,
    previous_reward: bool = False,
    tell_first: bool = False,
) -> World:
    """Make a world of an envpool id such as `CartPole-v1`.

    With `vector="async"`, `batch` agents act at once, those that finish first (0: half of them). Previous
    action, previous reward and `first` as inputs need synchronous stepping.
    """
    size = _batch_size(agents, vector, batch)
    envs = EnvpoolEnvs(env, agents, batch=size, threads=threads, options=options)
    if size is not None and not (previous_action or previous_reward or tell_first):
        return EnvpoolAsyncWorld(envs, seed=seed, device=device, keep=keep)
    return ExternalWorld(
        EnvpoolWorld(envs, seed=seed, device=device, keep=keep),
        previous_action=previous_action,
        previous_reward=previous_reward,
        tell_first=tell_first,
    )


def _batch_size(agents: int, vector: str, batch: int) -> int | None:
    """Return the batch size of asynchronous stepping; None: synchronous."""
    if vector not in ("sync", "async"):
        raise ConfigError(f"world.vector={vector}: give one of sync, async.")
    if agents < 1:
        raise ConfigError(f"world.agents={agents}: there must be at least 1.")
    if vector == "sync":
        if batch:
            raise ConfigError(f"world.batch={batch} needs world.vector=async; leave it out.")
        return None
    batch = batch or max(1, agents // 2)
    if batch < 1 or agents % batch:
        divisors = ", ".join(str(size) for size in range(1, agents + 1) if agents % size == 0)
        raise ConfigError(f"world.batch={batch} does not divide world.agents={agents}; give one of {divisors}.")
    return batch
