"""A vector environment as a world: the three ways to restart, made equal."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from holdfast.errors import ConfigError, ContractError
from holdfast.saved import misfit, require_same, taken, tensor_like
from holdfast.shapes import Shaped, Tensor
from holdfast.worlds import draws
from holdfast.worlds.gym.acts import Acts
from holdfast.worlds.gym.build import Built, close_env
from holdfast.worlds.gym.diary import require_diary
from holdfast.worlds.gym.numbered import FaultError, said
from holdfast.worlds.gym.sight import Sight
from holdfast.worlds.seen import Seen, choose
from holdfast.worlds.step import Anew, Step, WorldSpec, check_actions

SEEDS = 1 << 31
"""Seeds below this are taken by every environment."""


def openings(before: np.ndarray, ended: np.ndarray, agents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Say whose reset was shown in place of an answer: theirs whose episode had ended one call before."""
    if (before & ended).any():
        agent = int(agents[int((before & ended).argmax())])
        raise FaultError("it restarts, and its first observation comes with terminated or truncated", agent)
    return before


class VectorWorld:
    """Tells what a vector environment does, step by step.

    Where it restarts in the same step, or where we restart it (disabled), the row of an end shows the next
    episode, and `last_obs` what was last seen of the one before. Where it restarts in the next step, the
    row of an end shows what was last seen and is not `valid`, as nobody's action counts there; the next row
    opens an episode. So every episode has equally many valid steps, and they are the same.
    """

    def __init__(
        self, built: Built, *, seed: int, device: str | torch.device, keep: Sequence[int] = ()
    ) -> None:
        self.name, self.env, self.mode, self._numbered = built.name, built.env, built.mode, built.numbered
        self._ours = built.ours
        self.agents = self.env.num_envs
        self.device = torch.device(device)
        self._sight = Sight(self.env.single_observation_space, self.name, keep)
        self._acts = Acts(self.env.single_action_space, self.name)
        self.spec = WorldSpec(
            obs_shape=() if self._sight.parts else tuple(self._sight.space.shape or ()),
            action_names=self._acts.names,
            observation=self._sight.space,
            action=self._acts.space,
            truncates="always",
            name=self.name,
        )
        self.seed, self._first_agent = seed, 0
        self._everyone = range(self.agents)
        self._nobody = torch.zeros(self.agents, dtype=torch.bool, device=self.device)
        self._ended = np.zeros(self.agents, np.bool_)
        self._clock = -1

    def count_from(self, first_agent: int) -> None:
        """Seed every environment as a share of more of them does; said before `reset()`."""
        if self._ours is None:
            raise ConfigError(
                f"{self.name} takes one seed for all of its environments, so it cannot be a share of more; "
                "leave out world.vector=native, or trainer.num_workers."
            )
        self._first_agent = first_agent

    def reset(self) -> Step:
        """Start every agent's first episode, the same one each time."""
        self._clock = 0
        return self._open()

    def _open(self) -> Step:
        """Start an episode of every agent, which seed and clock decide."""
        seeds, self._ended = self._seeds(), np.zeros(self.agents, np.bool_)
        each = isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        with self._blaming():
            # Those that somebody wrote by hand take one seed for all of their environments.
            obs, _ = self.env.reset(seed=cast("Any", seeds if each else seeds[0]))
            seen = self._sight.read(obs, self._everyone)
        nobody = [np.zeros(self.agents, np.bool_) for _ in range(2)]
        return self._tell(seen, seen, np.zeros(self.agents, np.float32), *nobody, ~self._ended, ~self._ended)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let every environment take its agent's action."""
        if self._clock < 0:
            raise ContractError("Call reset() before the first step().")
        actions = actions.cpu()
        if not self._acts.fit(actions, self.agents):
            check_actions(actions, self.agents, self._acts.wanted)
        self._clock += 1
        with self._blaming():
            obs, *judged, info = self.env.step(self._acts.write(actions))
            seen = self._sight.read(obs, self._everyone)
            kinds = ("reward", np.float32), ("terminated", np.bool_), ("truncated", np.bool_)
            reward, terminated, truncated = (
                self._column(name, column, kind) for (name, kind), column in zip(kinds, judged, strict=True)
            )
            ended, everybody = terminated | truncated, np.ones(self.agents, np.bool_)
            if self.mode is AutoresetMode.NEXT_STEP:
                first = self._begun(ended)
                reward[first] = 0
                return self._tell(seen, seen, reward, terminated, truncated, first, ~ended)
            now, last = seen, seen
            if ended.any():
                now, last = self._restarted(seen, info, ended)
        return self._tell(now, last, reward, terminated, truncated, ended, everybody)

    def _seeds(self) -> list[int]:
        agents = torch.arange(self._first_agent, self._first_agent + self.agents)
        return draws.below(SEEDS, self.seed, draws.STREAM_WORLD, agents, max(self._clock, 0)).tolist()

    def state(self) -> dict[str, Any]:
        """Say where every environment is, by how it got there; ready-made ones cannot tell."""
        if self._clock < 0:
            raise ContractError("Call reset() before state().")
        with self._blaming():
            envs = None if self._ours is None else list(self._ours.call("tell_where"))
        return {
            "seed": self.seed,
            "mode": self.mode.name,
            "clock": self._clock,
            "ended": torch.from_numpy(self._ended.copy()),
            "envs": envs,
        }

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Let every environment live its episode again; if it cannot, begin one that it has not lived."""
        require_same(state, "seed", self.seed)
        require_same(state, "mode", self.mode.name)
        clock = taken(state, "clock", int)
        ended = tensor_like(state, "ended", torch.zeros(self.agents, dtype=torch.bool)).numpy()
        envs = self._told_of(state)
        # Everything is fresh first: no reset is due anywhere, and every environment has a generator.
        self._clock = 0
        step = self._open()
        self._clock = clock
        if envs is None or self._ours is None:
            return Anew(~self._nobody, self._open(), f"{self.name} cannot say where its environments are")
        self._ended = ended
        pasts = [{"episode": told, "otherwise": seed} for told, seed in zip(envs, self._seeds(), strict=True)]
        with self._blaming():
            self._ours.set_attr("past", pasts)
            return self._who_began_anew(step, self._ours.call("live_again"))

    def _told_of(self, state: Mapping[str, Any]) -> list[Any] | None:
        """Take what the environments told; None where that is of no use here."""
        envs = taken(state, "envs", object)
        if envs is None or self._ours is None:
            return None
        if not isinstance(envs, list) or len(envs) != self.agents:
            raise misfit(f"'envs' must be a list of {self.agents} environments")
        for told in envs:
            require_diary(told, self.env.single_action_space)
        return envs

    def _who_began_anew(self, step: Step, told: Sequence[tuple[str, Any]]) -> Anew | None:
        rows = {agent: obs for agent, (why, obs) in enumerate(told) if why}
        if not rows:
            return None
        agents = torch.tensor(list(rows))
        obs, who = step.obs.clone(), self._nobody.clone()
        obs[agents], who[agents] = cast("Any", self._sight.read_rows(rows).to(self.device)), True
        self._ended[agents.numpy()] = False
        reasons = Counter(why for why, _ in told if why)
        why = "; ".join(f"{why} ({count} of {self.agents} agents)" for why, count in reasons.items())
        return Anew(who, replace(step, obs=obs, last_obs=obs), f"{self.name}: {why}")

    def close(self) -> None:
        """Close the environments."""
        close_env(self.env)

    def _begun(self, ended: np.ndarray) -> np.ndarray:
        """Say who begins an episode, and note whose is over."""
        first, self._ended = openings(self._ended, ended, self._everyone), ended
        return first

    def _restarted(self, seen: Seen, info: Mapping[str, Any], ended: np.ndarray) -> tuple[Seen, Seen]:
        """Give what everybody sees now, and what was last seen of the episodes that ended."""
        if self.mode is AutoresetMode.SAME_STEP:
            return seen, self._last(seen, info.get("final_obs"), info.get("_final_obs", ended), ended)
        obs, _ = self.env.reset(options={"reset_mask": ended.copy()})
        return choose(torch.from_numpy(ended), self._sight.read(obs, self._everyone), seen), seen

    def _last(self, seen: Seen, final: Any, told: np.ndarray, ended: np.ndarray) -> Seen:
        """Take what was last seen from where Gymnasium puts it: by agent, or as a batch."""
        by_agent = isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object)
        rows = {int(agent): final[agent] if by_agent else final for agent in ended.nonzero()[0]}
        missing = [agent for agent, obs in rows.items() if obs is None or not told[agent]]
        if missing:
            raise FaultError(
                "its episode ended and it restarts in the same step, but info['final_obs'] does not say what "
                "was last seen",
                missing[0],
            )
        if not by_agent:
            return choose(torch.from_numpy(ended), self._sight.read(final, self._everyone), seen)
        last = seen.clone()
        last[torch.tensor(list(rows))] = cast("Any", self._sight.read_rows(rows))
        return last

    def _column(self, name: str, given: Any, kind: type[np.generic]) -> np.ndarray:
        """Copy a number or flag an agent."""
        column = np.array(given, dtype=kind)
        if column.shape != (self.agents,):
            raise FaultError(f"{name} is {list(column.shape)}; there are {self.agents} agents")
        return column

    def _tell(self, obs: Seen, last_obs: Seen, *columns: np.ndarray) -> Step:
        reward, *flags = (torch.from_numpy(column).to(self.device) for column in columns)
        terminated, truncated, first, valid = flags
        return Step(
            obs=obs.to(self.device),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            first=first,
            valid=valid,
            trial=self._nobody,
            last_obs=last_obs.to(self.device),
        )

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Say of whatever goes wrong inside whose it is, and when."""
        try:
            yield
        except FaultError as fault:
            raise self._error(fault) from fault.__cause__
        except Exception as error:
            raise self._error(self._misfit() or FaultError(said(error))) from error

    def _misfit(self) -> FaultError | None:
        """Find whose observation could not be put beside the others."""
        for each in self._numbered:
            wrong = self._sight.misfit(each.seen)
            if wrong:
                return FaultError(wrong, each.agent)
        return None

    def _error(self, fault: FaultError) -> ContractError:
        whose = "" if fault.agent is None else f", agent {self._first_agent + fault.agent}"
        return ContractError(f"{self.name}{whose}, step {self._clock}: {fault.told}.")
