"""Parallel environments side by side as one world: who is away is not valid, and who joins begins."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

from holdfast.errors import ConfigError, ContractError, CrowdError, HoldfastError
from holdfast.saved import misfit, require_same, taken, tensor_like
from holdfast.shapes import Shaped, Tensor
from holdfast.worlds import draws
from holdfast.worlds.gym.acts import Acts
from holdfast.worlds.gym.diary import require_diary
from holdfast.worlds.gym.numbered import FaultError, Numbered, said
from holdfast.worlds.gym.sight import Sight
from holdfast.worlds.gym.vector_world import SEEDS
from holdfast.worlds.pettingzoo.crowd import MemberError, Told
from holdfast.worlds.pettingzoo.find import Found
from holdfast.worlds.seen import Seen, nothing_seen
from holdfast.worlds.step import Anew, Step, WorldSpec, check_actions


class Page:
    """What everybody is told in one step, written down environment by environment."""

    def __init__(self, agents: int) -> None:
        self.reward = np.zeros(agents, np.float32)
        self.terminated, self.truncated, self.first, self.valid = np.zeros((4, agents), np.bool_)
        self.shown: dict[int, Any] = {}
        self.last: dict[int, Any] = {}

    def lived(self, told: Told, first_row: int) -> None:
        """Write what came of a step."""
        for place, reward in told.reward.items():
            self.reward[first_row + place] = reward
        for flags, places in ((self.terminated, told.terminated), (self.truncated, told.truncated)):
            flags[[first_row + place for place in places]] = True
        # Who is over sees it for the last time, and does nothing about it.
        for place, obs in told.last.items():
            self.shown[first_row + place] = self.last[first_row + place] = obs
        self.opens(told, first_row)

    def opens(self, told: Told, first_row: int) -> None:
        """Write who is there and who begins."""
        for place, obs in told.obs.items():
            self.shown[first_row + place] = obs
        self.valid[[first_row + place for place in told.obs]] = True
        self.first[[first_row + place for place in told.joined]] = True


class Crowds:
    """Tells what many parallel environments do, step by step; a row is somebody who may be there.

    Who is not there is not `valid`. An agent's episode begins when it joins (`first`) and is over when the
    environment says so; until it joins again, or the environment restarts, nobody acts in its row. The
    environment restarts when nobody is left, in the same step, from a seed that (seed, number of the
    environment, number of the episode) decide.
    """

    def __init__(
        self, found: Found, agents: int, *, seed: int, device: str | torch.device, keep: Sequence[int] = ()
    ) -> None:
        self.name, self.agents, self.seed, self.device = found.name, agents, seed, torch.device(device)
        one = found.make()
        self.crowd = len(one.names)
        if agents < 1 or agents % self.crowd:
            one.close()
            raise CrowdError(_not_whole(self.name, agents, one.names), self.crowd)
        self.envs = [one, *(found.make() for _ in range(agents // self.crowd - 1))]
        self._require_alike()
        self._numbered = [Numbered(env, number) for number, env in enumerate(self.envs)]
        self._sight, self._acts = Sight(one.sight, self.name, keep), Acts(one.act, self.name)
        self.spec = WorldSpec(
            obs_shape=() if self._sight.parts else tuple(self._sight.space.shape or ()),
            action_names=self._acts.names,
            observation=self._sight.space,
            action=self._acts.space,
            truncates="always",
            name=self.name,
            crowd=self.crowd,
        )
        self._nobody = torch.zeros(agents, dtype=torch.bool, device=self.device)
        self._episodes = torch.zeros(len(self.envs), dtype=torch.long)
        self._clock, self._first_env = -1, 0

    def count_from(self, first_agent: int) -> None:
        """Draw as the environments that begin with this agent in a bigger world."""
        if first_agent % self.crowd:
            raise ContractError(
                f"{self.name}: agent {first_agent} is not the first of a crowd of {self.crowd}."
            )
        self._first_env = first_agent // self.crowd

    def reset(self) -> Step:
        """Open the first episode of every environment, the same one each time."""
        self._clock, self._episodes = 0, torch.zeros_like(self._episodes)
        page = Page(self.agents)
        for number in range(len(self.envs)):
            self._open(number, page)
        # Who is not there yet has no memory of anything either.
        page.first[:] = True
        return self._tell(page)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let everybody act who is there; environments that nobody is left in restart."""
        if self._clock < 0:
            raise ContractError("Call reset() before the first step().")
        actions = actions.cpu()
        if not self._acts.fit(actions, self.agents):
            check_actions(actions, self.agents, self._acts.wanted)
        self._clock += 1
        taken_by = np.split(self._acts.write(actions), len(self.envs))
        page = Page(self.agents)
        for number, numbered in enumerate(self._numbered):
            env = self.envs[number]
            with self._blaming(number):
                before = env.there
                seen, _, over, *_ = numbered.step(taken_by[number])
                page.lived(env.heard(before, seen), number * self.crowd)
            if over:
                self._episodes[number] += 1
                self._open(number, page)
        return self._tell(page)

    def _open(self, number: int, page: Page) -> None:
        with self._blaming(number):
            seen, _ = self._numbered[number].reset(seed=self._seed_of(number))
            page.opens(self.envs[number].opened(seen), number * self.crowd)

    def _seed_of(self, number: int, later: int = 0) -> int:
        env = torch.tensor(self._first_env + number)
        return int(draws.below(SEEDS, self.seed, draws.STREAM_WORLD, env, self._episodes[number] + later))

    def state(self) -> dict[str, Any]:
        """Say where every environment is, by how it got there."""
        if self._clock < 0:
            raise ContractError("Call reset() before state().")
        told = [each.tell_where() for each in self._numbered]
        return {"seed": self.seed, "clock": self._clock, "episodes": self._episodes.clone(), "envs": told}

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Let every environment live its episode again; if it cannot, its next one begins."""
        require_same(state, "seed", self.seed)
        clock, episodes = taken(state, "clock", int), tensor_like(state, "episodes", self._episodes)
        envs = taken(state, "envs", list)
        if len(envs) != len(self.envs):
            raise misfit(f"'envs' must be a list of {len(self.envs)} environments")
        for told in envs:
            require_diary(told, self.envs[0].action_space)
        self._clock, self._episodes = clock, episodes
        page, reasons = Page(self.agents), Counter[str]()
        for number, told in enumerate(envs):
            with self._blaming(number):
                reasons.update(self._lived_again(number, told, page))
        if not reasons:
            return None
        told = "; ".join(f"{why} ({n} of {len(envs)} environments)" for why, n in reasons.items())
        who = torch.from_numpy(page.first).to(self.device)
        return Anew(self._whole_crowds(who), self._tell(page), f"{self.name}: {told}")

    def _lived_again(self, number: int, told: dict[str, Any], page: Page) -> list[str]:
        """Put one environment back; if it begins anew, write down what is seen and say why."""
        numbered = self._numbered[number]
        numbered.past = {"episode": told, "otherwise": self._seed_of(number, later=1)}
        why, seen = numbered.live_again()
        if not why:
            return []
        self._episodes[number] += 1
        page.opens(self.envs[number].opened(seen), number * self.crowd)
        return [why]

    def _whole_crowds(self, who: Tensor) -> Tensor:
        """Let all of a crowd begin anew if one does: who is away was part of the episode too."""
        return who.view(-1, self.crowd).any(1, keepdim=True).expand(-1, self.crowd).reshape(-1)

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()

    def _tell(self, page: Page) -> Step:
        with self._blaming():
            obs = self._laid_out(nothing_seen(self._sight.space, self.agents), page.shown)
            last = self._laid_out(obs.clone(), page.last) if page.last else obs
        columns = page.terminated, page.truncated, page.first, page.valid
        terminated, truncated, first, valid = (
            torch.from_numpy(column.copy()).to(self.device) for column in columns
        )
        return Step(
            obs=obs.to(self.device),
            reward=torch.from_numpy(page.reward).to(self.device),
            terminated=terminated,
            truncated=truncated,
            first=first,
            valid=valid,
            trial=self._nobody,
            last_obs=last.to(self.device),
        )

    def _laid_out(self, base: Seen, rows: Mapping[int, Any]) -> Seen:
        base[torch.tensor(list(rows))] = cast("Any", self._sight.read_rows(rows))
        return base

    def _require_alike(self) -> None:
        if len({id(env.inside) for env in self.envs}) < len(self.envs):
            raise ConfigError(
                f"{self.name} gave the same environment twice; let it make a new one each time."
            )
        one = self.envs[0]
        for env in self.envs:
            if (env.names, env.sight, env.act) != (one.names, one.sight, one.act):
                raise ConfigError(f"{self.name} makes environments with other agents or spaces each time.")

    @contextmanager
    def _blaming(self, number: int | None = None) -> Iterator[None]:
        """Say of whatever goes wrong inside whose it is, and when."""
        try:
            yield
        except HoldfastError:
            raise
        except MemberError as error:
            place = None if number is None or error.place is None else number * self.crowd + error.place
            raise self._error(error.told, number, place) from error.__cause__
        except FaultError as fault:
            # Inside an environment it is numbered; what is read of all of them goes by rows.
            row = fault.agent if number is None else None
            raise self._error(fault.told, number, row) from fault.__cause__
        except Exception as error:
            raise self._error(said(error), number, None) from error

    def _error(self, told: str, number: int | None, row: int | None) -> ContractError:
        whose = "" if number is None else f", environment {self._first_env + number}"
        if row is not None:
            env, place = divmod(row, self.crowd)
            whose = (
                f", agent {self._first_env * self.crowd + row} ({self.envs[0].names[place]} of environment "
            )
            whose += f"{self._first_env + env})"
        return ContractError(f"{self.name}{whose}, step {self._clock}: {told}.")


def _not_whole(name: str, agents: int, names: Sequence[Any]) -> str:
    crowd = len(names)
    fewer = agents // crowd * crowd
    near = f"{fewer} or {fewer + crowd}" if fewer else f"{crowd}"
    who = ", ".join(map(str, names[:3])) + (", ..." if crowd > 3 else "")
    return (
        f"{name} has {crowd} agents an environment ({who}); world.agents={agents} is not a multiple of "
        f"{crowd}; try {near}."
    )
