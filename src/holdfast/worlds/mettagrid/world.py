"""Simulations of mettagrid as one world of many agents."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError, ContractError, CrowdError
from holdfast.saved import misfit, require_same, taken
from holdfast.shapes import Shaped, Tensor
from holdfast.worlds.gym.numbered import FaultError
from holdfast.worlds.mettagrid.collect import collect
from holdfast.worlds.mettagrid.game import Game, find_game
from holdfast.worlds.mettagrid.room import LONGEST, Buffer, Room, require_repeatable
from holdfast.worlds.mettagrid.tmaze import tmaze
from holdfast.worlds.mettagrid.words import Words, action_names, window_of
from holdfast.worlds.step import Anew, Step, WorldSpec, check_actions

GAMES: dict[str, Callable[..., Game]] = {"tmaze": tmaze, "collect": collect}
"""The games that come with Holdfast."""
VIBE = "change_vibe_"
NOOP = "noop"
UNREAD = "lived again, its episode is another one: more decides it than seed and actions"


class MettaGridWorld:
    """Many simulations in one process, over one buffer; agents of one simulation are a crowd.

    `env` is the name of a game of ours, a function that returns a MettaGridConfig, or its name
    `package.module:function`; it is called with `options`. A time limit is told as truncation, any other end
    as termination, whatever the config says, and all agents of a simulation end together. Features and
    actions go by name: `words.py` tells how. With `agent_id` agents see their own number and those of others.
    """

    def __init__(
        self,
        agents: int,
        *,
        env: str | Callable[..., Any],
        seed: int = 0,
        device: str | torch.device = "cpu",
        options: Mapping[str, Any] | None = None,
        agent_id: bool = False,
    ) -> None:
        self.name, game = find_game(env, GAMES, options or {})
        self.agents, self.seed, self.device, self._game = agents, seed, torch.device(device), game
        self._crowd = int(game.config.game.num_agents)
        if agents < 1 or agents % self._crowd:
            good = max(1, round(agents / self._crowd)) * self._crowd
            raise CrowdError(
                f"world.agents={agents}: {self._crowd} agents share a simulation of {self.name}; give a "
                f"multiple such as {good}.",
                self._crowd,
            )
        require_repeatable(game, self.name)
        self._words = Words(game.config.game, self.name, agent_id=agent_id)
        self.spec = _spec(game, self.name, self._words)
        self._vibe = np.array([each.startswith(VIBE) for each in self.spec.action_names])
        if self._vibe.any() and self.spec.action_names[0] != NOOP:
            raise ConfigError(f"{self.name}: who changes a vibe does nothing else; enable game.actions.noop.")
        self._buffer = Buffer.of(agents, self.spec.obs_shape[0])
        self._nobody = torch.zeros(agents, dtype=torch.bool, device=self.device)
        self._rooms: list[Room] = []
        self._seen = np.zeros_like(self._buffer.observations)
        self._clock = -1
        self.count_from(0)

    def count_from(self, first_agent: int) -> None:
        """Be a share of a bigger world: draw as its simulations from that of `first_agent` on."""
        if first_agent % self._crowd or first_agent < 0:
            raise ContractError(
                f"{self.name}: first_agent={first_agent} is no multiple of the {self._crowd} agents that "
                "share a simulation."
            )
        self._first = first_agent // self._crowd
        if self._clock >= 0:
            raise ContractError(f"{self.name}: say count_from() before reset().")
        self._rooms = [
            Room(
                self._game,
                self._buffer.rows(start, self._crowd),
                seed=self.seed,
                number=self._first + start // self._crowd,
                actions=len(self.spec.action_names),
            )
            for start in range(0, self.agents, self._crowd)
        ]

    def reset(self) -> Step:
        """Start every simulation's first episode, the same one each time."""
        self._clock = 0
        with self._blaming():
            for room in self._rooms:
                room.open(0)
            self._look(slice(None))
        nobody = np.zeros(self.agents, np.bool_)
        return self._tell(self._seen, np.zeros(self.agents, np.float32), nobody, nobody, ~nobody)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let every simulation take its agents' actions; those that are over begin anew."""
        if self._clock < 0:
            raise ContractError("Call reset() before the first step().")
        actions = actions.cpu()
        check_actions(actions, self.agents, len(self.spec.action_names))
        self._clock += 1
        chosen = actions.numpy()
        terminated, truncated = (np.zeros(self.agents, np.bool_) for _ in range(2))
        over: list[tuple[Room, slice]] = []
        with self._blaming():
            for start, room in zip(range(0, self.agents, self._crowd), self._rooms, strict=True):
                rows = slice(start, start + self._crowd)
                ended, cut = self._act(room, chosen[rows])
                if ended:
                    (truncated if cut else terminated)[rows] = True
                    over.append((room, rows))
            self._look(slice(None))
            # Copied before any simulation begins anew: it would be overwritten.
            last, reward = self._seen, self._buffer.rewards.copy()
            if over:
                self._seen = self._seen.copy()
            for room, rows in over:
                room.open(room.episode + 1)
                self._look(rows)
        return self._tell(last, reward, terminated, truncated, terminated | truncated)

    def state(self) -> dict[str, Any]:
        """Say where every simulation is, by how it got there."""
        if self._clock < 0:
            raise ContractError("Call reset() before state().")
        return {
            "seed": self.seed,
            "first": self._first,
            "clock": self._clock,
            "rooms": [room.told() for room in self._rooms],
        }

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Let every simulation live its episode again; one that cannot begins its next one."""
        require_same(state, "seed", self.seed)
        require_same(state, "first", self._first)
        clock, told = taken(state, "clock", int), taken(state, "rooms", list)
        if len(told) != len(self._rooms):
            raise misfit(f"there are {len(told)} simulations, must be {len(self._rooms)}")
        lives = [room.read(each) for room, each in zip(self._rooms, told, strict=True)]
        self._clock, why = clock, list[str]()
        with self._blaming():
            for room, each, life in zip(self._rooms, told, lives, strict=True):
                why.append(self._lived_again(room, each, life))
                if why[-1]:
                    room.open(each["episode"] + 1)
            self._look(slice(None))
        return self._who_began_anew(why)

    def close(self) -> None:
        """Let go of every simulation."""
        for room in self._rooms:
            room.close()

    def _act(self, room: Room, chosen: np.ndarray) -> tuple[bool, bool]:
        """Write actions where the engine reads them: vibes are a stream of their own."""
        vibe = self._vibe[chosen]
        room.rows.actions[:] = np.where(vibe, 0, chosen)
        room.rows.vibe_actions[:] = np.where(vibe, chosen, 0)
        return room.step(chosen)

    def _look(self, rows: slice) -> None:
        """Read what simulations wrote, and copy it."""
        seen = self._words.read(self._buffer.observations[rows])
        odd = self._words.unknown(seen)
        if odd is not None:
            row = int(odd[0]) + (rows.start or 0)
            raise FaultError(
                f"agent {self._first * self._crowd + row} sees a token that the configuration does not "
                "explain; its features and tags must be those of game.id_map()",
                self._first + row // self._crowd,
            )
        if rows == slice(None):
            self._seen = seen
        else:
            self._seen[rows] = seen

    def _lived_again(self, room: Room, told: Mapping[str, Any], life: np.ndarray | None) -> str:
        if life is None:
            return f"an episode of more than {LONGEST:,} steps is not lived again"
        room.open(told["episode"])
        for number, chosen in enumerate(life, 1):
            ended, _ = self._act(room, chosen.astype(np.int64))
            if ended:
                return f"lived again, its episode ends after {number} steps, not later"
        return "" if room.told()["lived"] == told["lived"] else UNREAD

    def _who_began_anew(self, why: Sequence[str]) -> Anew | None:
        if not any(why):
            return None
        who = np.repeat([bool(each) for each in why], self._crowd)
        nobody = np.zeros(self.agents, np.bool_)
        step = self._tell(self._seen, np.zeros(self.agents, np.float32), nobody, nobody, who)
        reasons = Counter(each for each in why if each)
        told = "; ".join(f"{each} ({count} of {len(why)} simulations)" for each, count in reasons.items())
        return Anew(torch.from_numpy(who).to(self.device), step, f"{self.name}: {told}")

    def _tell(self, last: np.ndarray, reward: np.ndarray, *flags: np.ndarray) -> Step:
        terminated, truncated, first = (torch.from_numpy(flag).to(self.device) for flag in flags)
        return Step(
            obs=torch.from_numpy(self._seen).to(self.device),
            reward=torch.from_numpy(reward).to(self.device),
            terminated=terminated,
            truncated=truncated,
            first=first,
            valid=~self._nobody,
            trial=self._nobody,
            last_obs=torch.from_numpy(last).to(self.device),
        )

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Say of whatever goes wrong inside in which simulation it was, and when."""
        try:
            yield
        except FaultError as fault:
            told = f"{self.name}, simulation {fault.agent}, step {self._clock}: {fault.told}."
            raise ContractError(told) from fault.__cause__


def _spec(game: Game, name: str, words: Words) -> WorldSpec:
    """Say what policies must know of a game."""
    config = game.config.game
    return WorldSpec(
        obs_shape=(int(config.obs.num_tokens), 3),
        action_names=action_names(config),
        features=tuple(words.features),
        window=window_of(config, name),
        truncates="always",
        best_return=game.best_return,
        best_return_without_memory=game.best_return_without_memory,
        name=name,
        crowd=int(config.num_agents),
    )
