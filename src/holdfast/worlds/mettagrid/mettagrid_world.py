"""MettaGridWorld: mettagrid simulations as one world of many agents."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from holdfast.errors import ConfigError, ContractError
from holdfast.state_tree import get_field, mismatch, require_equal
from holdfast.types import Shaped, Tensor
from holdfast.worlds.gym.episode_log import EnvError, count_reasons
from holdfast.worlds.gym.spaces import external_step
from holdfast.worlds.mettagrid.games import Game, find_game
from holdfast.worlds.mettagrid.simulation import (
    MAX_LOGGED_STEPS,
    Simulation,
    Vocabulary,
    action_names,
    new_buffers,
    require_repeatable,
    select_rows,
    window_of,
)
from holdfast.worlds.obs import check_actions
from holdfast.worlds.step import Device, GridView, Restarted, Step, WorldSpec, check_agent_count


class MettaGridWorld:
    """Simulations in one process, over one buffer.

    `env` is the name of a built-in game, a function that returns a MettaGridConfig, or its name
    `package.module:function`; it is called with `options`. A time limit is a truncation, any other end a
    termination, whatever the config says, and the episodes of all agents of a simulation end together.
    Features and actions are identified by name (see `Vocabulary`). With `agent_id` agents observe agent ids.
    """

    def __init__(
        self,
        agents: int,
        *,
        env: str | Callable[..., Any],
        seed: int = 0,
        device: Device = "cpu",
        options: Mapping[str, Any] | None = None,
        agent_id: bool = False,
    ) -> None:
        self.name, game = find_game(env, options or {})
        self.agents, self.seed, self.device = agents, seed, torch.device(device)
        self._agents_per_env = int(game.config.game.num_agents)
        check_agent_count(self.name, agents, self._agents_per_env)
        require_repeatable(game, self.name)
        self._vocabulary = Vocabulary(game.config.game, self.name, agent_id=agent_id)
        self.spec = _spec(game, self.name, self._vocabulary)
        self._is_vibe = np.array([name.startswith("change_vibe_") for name in self.spec.action_names])
        if self._is_vibe.any() and self.spec.action_names[0] != "noop":
            raise ConfigError(f"{self.name}: an agent that changes its vibe does not move; enable game.actions.noop.")
        self._buffers = new_buffers(agents, self.spec.obs_shape[0])
        self._simulations = [
            Simulation(game, select_rows(self._buffers, start, self._agents_per_env), seed, len(self.spec.action_names))
            for start in range(0, agents, self._agents_per_env)
        ]
        self._obs = np.zeros_like(self._buffers.observations)
        self._clock = -1
        self.set_agent_offset(0)

    def set_agent_offset(self, first_agent: int) -> None:
        """Seed the simulations as a shard of a larger world; call before `reset()`."""
        if first_agent % self._agents_per_env or first_agent < 0:
            raise ContractError(
                f"{self.name}: a shard starts at a multiple of {self._agents_per_env}, not {first_agent}."
            )
        if self._clock >= 0:
            raise ContractError(f"{self.name}: call set_agent_offset() before reset().")
        self._first = first_agent // self._agents_per_env
        for number, simulation in enumerate(self._simulations, self._first):
            simulation.number = number

    def reset(self) -> Step:
        """Start every simulation's first episode, the same one each time."""
        self._clock = 0
        with self._error_context():
            for simulation in self._simulations:
                simulation.open(0)
            self._read_obs(slice(None))
        return self._first_step(np.ones(self.agents, np.bool_))

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Step every simulation with its agents' actions; those that end start their next episode."""
        if self._clock < 0:
            raise ContractError("Call reset() before the first step().")
        actions = actions.cpu()
        check_actions(actions, self.agents, len(self.spec.action_names))
        self._clock += 1
        action_rows = actions.numpy()
        terminated, truncated = np.zeros((2, self.agents), np.bool_)
        ended: list[tuple[Simulation, slice]] = []
        with self._error_context():
            for number, simulation in enumerate(self._simulations):
                rows = slice(number * self._agents_per_env, (number + 1) * self._agents_per_env)
                is_done, by_limit = self._step_simulation(simulation, action_rows[rows])
                if is_done:
                    (truncated if by_limit else terminated)[rows] = True
                    ended.append((simulation, rows))
            self._read_obs(slice(None))
            # Copied before any simulation restarts and overwrites them.
            last_obs, reward = self._obs, self._buffers.rewards.copy()
            if ended:
                self._obs = self._obs.copy()
            for simulation, rows in ended:
                simulation.open(simulation.episode + 1)
                self._read_obs(rows)
        return self._make_step(last_obs, reward, terminated, truncated, terminated | truncated)

    def state(self) -> dict[str, Any]:
        """Return the episode log of every simulation."""
        if self._clock < 0:
            raise ContractError("Call reset() before state().")
        return {
            "seed": self.seed,
            "clock": self._clock,
            "simulations": [simulation.state() for simulation in self._simulations],
        }

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Replay every simulation's episode; where that is impossible, start its next one."""
        require_equal(state, "seed", self.seed)
        clock, logs = get_field(state, "clock", int), get_field(state, "simulations", list)
        if len(logs) != len(self._simulations):
            raise mismatch(f"there are {len(logs)} simulations, must be {len(self._simulations)}")
        pairs = list(zip(self._simulations, logs, strict=True))
        # All logs are checked before any simulation changes.
        action_logs = [simulation.logged_actions(log) for simulation, log in pairs]
        self._clock, reasons = clock, list[str]()
        with self._error_context():
            for (simulation, log), actions in zip(pairs, action_logs, strict=True):
                reasons.append(self._replay(simulation, log, actions))
                if reasons[-1]:
                    simulation.open(log["episode"] + 1)
            self._read_obs(slice(None))
        if not any(reasons):
            return None
        mask = np.repeat([bool(reason) for reason in reasons], self._agents_per_env)
        text = f"{self.name}: {count_reasons(reasons, 'simulations')}"
        return Restarted(torch.from_numpy(mask).to(self.device), self._first_step(mask), text)

    def grid_view(self) -> GridView:
        """Return the map of every simulation, with the objects on it."""
        kinds = ("floor", *self._simulations[0].object_kinds())
        views = [simulation.grid_view(kinds, self._agents_per_env) for simulation in self._simulations]
        cells, agents = (np.stack(part) for part in zip(*views, strict=True))
        return GridView(kinds, torch.from_numpy(cells), torch.from_numpy(agents).flatten(0, 1))

    def close(self) -> None:
        """Close every simulation."""
        for simulation in self._simulations:
            simulation.close()

    def _step_simulation(self, simulation: Simulation, actions: np.ndarray) -> tuple[bool, bool]:
        """Write actions to the engine's two arrays, moves and vibes, and step."""
        is_vibe = self._is_vibe[actions]
        simulation.rows.actions[:] = np.where(is_vibe, 0, actions)
        simulation.rows.vibe_actions[:] = np.where(is_vibe, actions, 0)
        return simulation.step(actions)

    def _read_obs(self, rows: slice) -> None:
        """Translate and copy the observations in the buffer."""
        tokens = self._vocabulary.translate(self._buffers.observations[rows])
        unknown = self._vocabulary.unknown(tokens)
        if unknown is not None:
            row = int(unknown[0]) + (rows.start or 0)
            raise EnvError(
                f"agent {self._first * self._agents_per_env + row} observes a token that the config does not "
                "define; its features and tags must be those of game.id_map()",
                self._first + row // self._agents_per_env,
            )
        if rows == slice(None):
            self._obs = tokens
        else:
            self._obs[rows] = tokens

    def _replay(self, simulation: Simulation, log: Mapping[str, Any], actions: np.ndarray | None) -> str:
        """Replay an episode; return why it is not the saved one, or an empty string."""
        if actions is None:
            return f"an episode of more than {MAX_LOGGED_STEPS:,} steps is not replayed"
        simulation.open(log["episode"])
        for number, row in enumerate(actions, 1):
            is_done, _ = self._step_simulation(simulation, row.astype(np.int64))
            if is_done:
                return f"the replayed episode ends after {number} steps, not later"
        if simulation.state()["digest"] == log["digest"]:
            return ""
        return "the replayed episode differs: it depends on more than seed and actions"

    def _first_step(self, first: np.ndarray) -> Step:
        ends = np.zeros((2, self.agents), np.bool_)
        return self._make_step(self._obs, np.zeros(self.agents, np.float32), *ends, first)

    def _make_step(self, last_obs: np.ndarray, reward: np.ndarray, *flags: np.ndarray) -> Step:
        obs, last = torch.from_numpy(self._obs), torch.from_numpy(last_obs)
        return external_step(obs, last, self.device, reward, *flags, np.ones(self.agents, np.bool_))

    @contextmanager
    def _error_context(self) -> Iterator[None]:
        """Turn an EnvError into a ContractError with the simulation and the step."""
        try:
            yield
        except EnvError as error:
            message = f"{self.name}, simulation {error.agent}, step {self._clock}: {error.message}."
            raise ContractError(message) from error.__cause__


def _spec(game: Game, name: str, vocabulary: Vocabulary) -> WorldSpec:
    config = game.config.game
    return WorldSpec(
        obs_shape=(int(config.obs.num_tokens), 3),
        action_names=action_names(config),
        features=tuple(vocabulary.features),
        window=window_of(config, name),
        truncates="always",
        best_return=game.best_return,
        best_return_without_memory=game.best_return_without_memory,
        name=name,
        agents_per_env=int(config.num_agents),
    )
