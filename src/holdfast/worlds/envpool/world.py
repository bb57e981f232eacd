"""envpool's environments as one world of many agents, answered all at once or in turns."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import torch

from holdfast.errors import ConfigError, ContractError
from holdfast.saved import require_same, taken
from holdfast.shapes import Int, Shaped, Tensor
from holdfast.worlds import draws
from holdfast.worlds.envpool.pool import Pool
from holdfast.worlds.gym.acts import Acts
from holdfast.worlds.gym.numbered import FaultError
from holdfast.worlds.gym.sight import Sight
from holdfast.worlds.gym.vector_world import SEEDS, openings
from holdfast.worlds.inputs import with_inputs
from holdfast.worlds.step import Anew, Step, World, WorldSpec, check_actions
from holdfast.worlds.turns import Turn, joined


class EnvpoolWorld:
    """An environment for every agent, in threads of this process; all are answered at once.

    It restarts in the next step: the row of an end shows what was last seen and is not `valid`, the next row
    opens an episode. Agent i's environment is seeded by (seed, i) alone.
    """

    def __init__(
        self, pool: Pool, *, seed: int = 0, device: str | torch.device = "cpu", keep: Sequence[int] = ()
    ) -> None:
        self.name, self.agents, self.seed, self._pool = pool.name, pool.envs, seed, pool
        self.device = torch.device(device)
        self._sight, self._acts = Sight(pool.sight, self.name, keep), Acts(pool.act, self.name)
        self.spec = WorldSpec(
            obs_shape=() if self._sight.parts else tuple(self._sight.space.shape or ()),
            action_names=self._acts.names,
            observation=self._sight.space,
            action=self._acts.space,
            truncates="always",
            name=self.name,
        )
        self._ended = np.zeros(self.agents, np.bool_)
        # How many steps each was told since the pool was opened, the first one not counted.
        self._ages = np.full(self.agents, -1)

    def reset(self) -> Step:
        """Start every agent's first episode, the same one each time."""
        return self._open(0)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let everybody act, and wait for all of them."""
        self.send(torch.arange(self.agents), actions)
        return self._all()

    def send(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Let some agents act, and do not wait for them."""
        if self._ages.min() < 0:
            raise ContractError("Call reset() before the first step().")
        busy = rows[torch.from_numpy(self._pool.busy[rows.numpy()])]
        if len(busy):
            raise ContractError(
                f"{self.name}: agent {int(busy[0])} was answered and acts already; wait for it."
            )
        actions = actions.cpu()
        if not self._acts.fit(actions, len(rows)):
            check_actions(actions, len(rows), self._acts.wanted)
        self._pool.send(rows.numpy(), self._acts.write(actions))

    def receive(self) -> Turn:
        """Wait for some of those who act, and give what they are told."""
        if not self._pool.busy.any():
            raise ContractError(f"{self.name}: nobody acts, so nothing comes of it; answer somebody first.")
        told = self._pool.receive()
        rows = told.rows
        self._ages[rows] += 1
        with self._blaming(rows):
            seen = self._sight.read(told.obs, rows.tolist()).to(self.device)
            ended = told.terminated | told.truncated
            first = (self._ages[rows] == 0) | openings(self._ended[rows], ended, rows)
        self._ended[rows] = ended
        reward = np.where(first, 0, told.reward).astype(np.float32)
        columns = told.terminated, told.truncated, first, ~ended, np.zeros(len(rows), np.bool_)
        terminated, truncated, first, valid, trial = (torch.from_numpy(c).to(self.device) for c in columns)
        step = Step(
            obs=seen,
            reward=torch.from_numpy(reward).to(self.device),
            terminated=terminated,
            truncated=truncated,
            first=first,
            valid=valid,
            trial=trial,
            last_obs=seen,
        )
        return Turn(torch.from_numpy(rows), step)

    def state(self) -> dict[str, Any]:
        """Say how much was lived: where its environments are, envpool does not tell."""
        if self._ages.min() < 0:
            raise ContractError("Call reset() before state().")
        return {"seed": self.seed, "lived": int(self._ages.sum())}

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Let everybody begin an episode that was not lived yet."""
        require_same(state, "seed", self.seed)
        step = self._open(1 + taken(state, "lived", int))
        return Anew(torch.ones_like(step.first), step, f"{self.name} cannot say where its environments are")

    def close(self) -> None:
        """End the threads."""
        self._pool.close()

    def _open(self, clock: int) -> Step:
        """Make all environments anew, from seeds that seed and clock decide."""
        agents = torch.arange(self.agents)
        self._pool.open(draws.below(SEEDS, self.seed, draws.STREAM_WORLD, agents, clock).tolist())
        self._ages[:] = -1
        return self._all()

    def _all(self) -> Step:
        """Wait for everybody, and lay out what they are told by agents."""
        turns = [self.receive()]
        while self._pool.busy.any():
            turns.append(self.receive())
        return joined(turns)

    @contextmanager
    def _blaming(self, rows: np.ndarray) -> Iterator[None]:
        try:
            yield
        except FaultError as fault:
            agent = int(rows[0]) if fault.agent is None else fault.agent
            when = f"agent {agent}, step {self._ages[agent]}"
            raise ContractError(f"{self.name}, {when}: {fault.told}.") from fault.__cause__


class EnvpoolTurns:
    """The same, in turns: who is done is told first, and answered while others still act.

    Everybody lives the same life as if all were answered at once.
    """

    def __init__(self, world: EnvpoolWorld, batch: int) -> None:
        self._world, self.agents, self.spec, self.name = world, world.agents, world.spec, world.name
        self.shares: tuple[Int[Tensor, " N"], ...] = torch.arange(self.agents).split(batch)

    def reset(self) -> Step:
        """Start every agent's first episode, the same one each time."""
        return self._world.reset()

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let everybody act, and wait for all of them."""
        return self._world.step(actions)

    def answer(self, rows: Int[Tensor, " N"], actions: Shaped[Tensor, "N ..."]) -> None:
        """Let some agents act, and do not wait for what comes of it."""
        self._world.send(rows, actions)

    def turn(self) -> Turn:
        """Wait for some of those who were answered: at least one, and at most a batch."""
        return self._world.receive()

    def state(self) -> dict[str, Any]:
        """Say how much was lived."""
        return self._world.state()

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Let everybody begin an episode that was not lived yet."""
        return self._world.restore(state)

    def close(self) -> None:
        """End the threads."""
        self._world.close()


def envpool_world(
    agents: int,
    *,
    env: str,
    seed: int = 0,
    device: str | torch.device = "cpu",
    vector: Literal["sync", "async"] = "sync",
    batch: int = 0,
    threads: int = 0,
    options: Mapping[str, Any] | None = None,
    keep: Sequence[int] = (),
    previous_action: bool = False,
    previous_reward: bool = False,
    tell_first: bool = False,
) -> World:
    """Make a world of an id that envpool knows, such as `CartPole-v1`.

    With `vector="async"`, `batch` agents are answered at once, those who are done first (0: half of them);
    what is shown beside an observation needs all of them at once.
    """
    together = _batch_of(agents, vector, batch)
    pool = Pool(env, agents, batch=together, threads=threads, options=options)
    world = EnvpoolWorld(pool, seed=seed, device=device, keep=keep)
    shown = {"previous_action": previous_action, "previous_reward": previous_reward, "tell_first": tell_first}
    if together is not None and not any(shown.values()):
        return EnvpoolTurns(world, together)
    return with_inputs(world, **shown)


def _batch_of(agents: int, vector: str, batch: int) -> int | None:
    """Say how many are answered at once in turns; None: there are no turns."""
    if vector not in ("sync", "async"):
        raise ConfigError(f"world.vector={vector}: give one of sync, async.")
    if agents < 1:
        raise ConfigError(f"world.agents={agents}: there must be at least 1.")
    if vector == "sync":
        if batch:
            raise ConfigError(f"world.batch={batch} goes with world.vector=async; leave it out.")
        return None
    batch = batch or max(1, agents // 2)
    if batch < 1 or agents % batch:
        near = [each for each in range(1, agents + 1) if agents % each == 0]
        told = ", ".join(map(str, near))
        raise ConfigError(f"world.batch={batch} does not divide world.agents={agents}; give one of {told}.")
    return batch
