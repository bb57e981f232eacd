"""PettingZooWorld: parallel environments of PettingZoo as a world, with agents that leave and join."""

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from holdfast import rng
from holdfast.errors import AgentCountError, ConfigError, ContractError, HoldfastError, error_text, located_error_text
from holdfast.registry import import_named, import_object, load_module
from holdfast.state_tree import get_field, get_tensor_like, require_equal
from holdfast.trust import require_trust_to_call
from holdfast.types import Shaped, Tensor
from holdfast.worlds.gym.episode_log import AgentEnv, EnvError, as_flag, count_reasons, require_episode_logs
from holdfast.worlds.gym.frames import frame_of, modes_of
from holdfast.worlds.gym.make_env import make_and_wrap
from holdfast.worlds.gym.seed_episodes import SEEDS
from holdfast.worlds.gym.spaces import ActionConverter, ObsConverter, external_spec, external_step
from holdfast.worlds.gym.wrappers import NamedWrap, Wrap, import_wrappers, name_of
from holdfast.worlds.obs import Obs, zero_obs
from holdfast.worlds.previous_inputs import ExternalWorld
from holdfast.worlds.step import Device, Restarted, Step, check_agent_count

PREFIX = "pettingzoo:"
PADDING_WRAPPERS = {"observation": "supersuit:pad_observations_v0", "action": "supersuit:pad_action_space_v0"}
"""Wrappers that make spaces of different sizes equal."""


class StepRows:
    """The rows of one step of all agents, filled environment by environment."""

    def __init__(self, agents: int) -> None:
        self.reward = np.zeros(agents, np.float32)
        self.terminated, self.truncated, self.first, self.valid = np.zeros((4, agents), np.bool_)
        self.obs: dict[int, Any] = {}
        self.last: dict[int, Any] = {}
        """Final observations of agents whose episode ended, where the environment gives one."""


class ParallelEnvAdapter(gymnasium.Env[Any, Any]):
    """A parallel environment as one `gymnasium.Env`; all possible agents must have equal spaces.

    Its agents have the rows from `first_row` on, in the order of `possible_agents`. An action has one entry per
    possible agent; those of absent agents are ignored. An observation is the dict of raw outputs, which `read_reset`
    and `read_step` write into the rows of a step. The episode ends when no agent is left.
    """

    def __init__(self, env: Any, name: str, first_row: int) -> None:
        self.env = env
        try:
            self.names = list(env.possible_agents)
        except AttributeError as error:
            raise ConfigError(f"{name} has no possible_agents; it must list all agents.") from error
        if not self.names:
            raise ConfigError(f"{name}: its possible_agents are empty; there must be at least one agent.")
        self._row_of = {agent: row for row, agent in enumerate(self.names, first_row)}
        self.obs_space = self._shared_space("observation", env.observation_space, name)
        self.act_space = self._shared_space("action", env.action_space, name)
        self.action_space = batch_space(self.act_space, len(self.names))
        self.present: list[Any] = []
        """Names of the agents present now."""

    @property
    def np_random(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # read only
        """The environment's generator, if it has one."""
        return getattr(self.env.unwrapped, "np_random", None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        obs, _ = self.env.reset(seed=seed, options=options)
        # Copied: some environments modify their list in place.
        self.present = list(self.env.agents)
        return {"obs": obs, "agents": tuple(self.present)}, {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment with the actions of the agents present."""
        action_of = dict(zip(self.names, action, strict=True))
        obs, reward, terminated, truncated, _ = self.env.step({agent: action_of[agent] for agent in self.present})
        self.present = list(self.env.agents)
        outputs = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        return {**outputs, "agents": tuple(self.present)}, 0.0, not self.present, False, {}

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    def read_reset(self, outputs: Mapping[str, Any], rows: StepRows) -> None:
        """Write the outputs of a reset into the rows."""
        if not outputs["agents"]:
            raise EnvError("no agent is present at the episode start: agents is empty after reset()")
        self._read_obs(outputs, rows, acted=())

    def read_step(self, outputs: Mapping[str, Any], rows: StepRows, acted: Collection[Any]) -> None:
        """Write the outputs of a step in which the agents `acted` acted into the rows."""
        for agent in acted:
            row = self._row_of[agent]
            rows.reward[row] = float(self._get(outputs, "reward", agent))
            terminated, truncated = (as_flag(k, self._get(outputs, k, agent)) for k in ("terminated", "truncated"))
            rows.terminated[row], rows.truncated[row] = terminated, truncated
            if terminated or truncated:
                self._read_last_obs(outputs, rows, agent, required=not terminated)
            elif agent not in outputs["agents"]:
                raise EnvError(
                    "it is not in agents any more, but neither terminated nor truncated; set one of them in the step "
                    "in which it leaves",
                    row,
                )
        self._read_obs(outputs, rows, acted)

    def _read_last_obs(self, outputs: Mapping[str, Any], rows: StepRows, agent: Any, required: bool) -> None:
        row = self._row_of[agent]
        if agent in outputs["agents"]:
            raise EnvError(
                "its episode is over (terminated, truncated) and it is still in agents; remove it, it may join again "
                "in a later step",
                row,
            )
        if agent in outputs["obs"]:
            # The row of an agent that leaves shows its final observation, and is not valid.
            rows.obs[row] = rows.last[row] = outputs["obs"][agent]
        elif required:
            raise EnvError("it was truncated, but has no final observation", row)

    def _read_obs(self, outputs: Mapping[str, Any], rows: StepRows, acted: Collection[Any]) -> None:
        """Read the observations of the agents present; those that did not act have joined."""
        for agent in outputs["agents"]:
            if agent not in self._row_of:
                raise EnvError(f"agents has {agent!r}, which is not in possible_agents")
        for agent in sorted(outputs["agents"], key=self._row_of.__getitem__):
            row = self._row_of[agent]
            rows.obs[row] = self._get(outputs, "obs", agent)
            rows.valid[row], rows.first[row] = True, agent not in acted

    def _get(self, outputs: Mapping[str, Any], key: str, agent: Any) -> Any:
        # By [] and not get(): the environment's reward dict may have a default.
        try:
            return outputs[key][agent]
        except (KeyError, TypeError) as error:
            word = "observation" if key == "obs" else key
            raise EnvError(f"it has no {word}", self._row_of[agent]) from error

    def _shared_space(self, kind: str, space_of: Callable[[Any], spaces.Space[Any]], name: str) -> spaces.Space[Any]:
        """Return the space of all agents; they share one policy, so it must be equal for all."""
        first = space_of(self.names[0])
        for agent in self.names[1:]:
            space = space_of(agent)
            if space != first:
                raise ConfigError(
                    f"{name}: the {kind} space of {self.names[0]} is {first}, that of {agent} is {space}; all must be "
                    f"equal. If they differ in size, pad them: world.wrappers={PADDING_WRAPPERS[kind]}."
                )
        return first


MakeEnv = Callable[[int], ParallelEnvAdapter]
"""Makes an environment whose agents have the rows from a first one on."""


def find_parallel_env(
    env: str | Callable[..., Any], options: Mapping[str, Any], wrappers: Sequence[Wrap]
) -> tuple[str, MakeEnv]:
    """Find an environment by module or `package.module:function`, or take the callable; return its name, too."""
    zoo = load_module("", "pettingzoo", PREFIX.removesuffix(":"))
    source = _resolve(env) if isinstance(env, str) else env
    name = f"{PREFIX}{name_of(env)}"
    if not callable(source):
        raise ConfigError(f"{name}: {source!r} is not a function or class that makes a parallel environment.")
    if isinstance(env, str) and ":" in env:
        require_trust_to_call(env, source)
    if isinstance(source, type) and not issubclass(source, zoo.ParallelEnv | zoo.AECEnv):
        # Checked before the call: any other class could do anything with the options.
        raise ConfigError(f"{name}: {source!r} is not a subclass of pettingzoo.ParallelEnv.")
    return name, partial(_make, name, partial(source, **options), import_wrappers(wrappers))


def _resolve(name: str) -> Any:
    """Return the function or class of a name; of a module, its `parallel_env`."""
    module, colon, _ = name.partition(":")
    members = vars(import_named(name, module, PREFIX))
    if colon:
        return import_object(name, PREFIX)
    if "parallel_env" not in members:
        raise ConfigError(
            f"{PREFIX}{name}: {module} has no parallel_env; name the function or class by {PREFIX}{module}:NAME."
        )
    return members["parallel_env"]


def _make(name: str, make: Callable[[], Any], wrappers: Sequence[NamedWrap], first_row: int) -> ParallelEnvAdapter:
    env = make_and_wrap(name, make, wrappers)
    zoo = importlib.import_module("pettingzoo")
    if isinstance(env, zoo.AECEnv):
        raise ConfigError(
            f"{name} makes an AECEnv, in which agents act in turns; it must make a ParallelEnv. If it can be "
            "converted, write world.wrappers=pettingzoo.utils.conversions:aec_to_parallel."
        )
    if not isinstance(env, zoo.ParallelEnv):
        raise ConfigError(f"{name} makes {env!r}; it must make a pettingzoo.ParallelEnv.")
    try:
        return ParallelEnvAdapter(env, name, first_row)
    except HoldfastError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} does not give its spaces: {error_text(error)}") from error


class ParallelEnvWorld:
    """Parallel environments as a world; a row is a possible agent.

    Rows of absent agents are not `valid`. An agent's episode starts when it joins (`first`) and ends when the
    environment says so; its row stays invalid until it joins again or the environment resets. The environment resets
    in the step in which the last agent leaves, with a seed that depends on (seed, environment, episode) alone.
    """

    def __init__(
        self, name: str, make_env: MakeEnv, agents: int, *, seed: int, device: Device, keep: Sequence[int] = ()
    ) -> None:
        self.name, self.agents, self.seed, self.device = name, agents, seed, torch.device(device)
        env = make_env(0)
        self.agents_per_env = len(env.names)
        try:
            check_agent_count(name, agents, self.agents_per_env)
        except AgentCountError:
            env.close()
            raise
        self.envs = [env, *map(make_env, range(self.agents_per_env, agents, self.agents_per_env))]
        self._require_same_spaces()
        self._agent_envs = [AgentEnv(env) for env in self.envs]
        self._obs_converter = ObsConverter(env.obs_space, name, keep)
        self._action_converter = ActionConverter(env.act_space, name)
        self.spec = external_spec(name, self._obs_converter, self._action_converter, self.agents_per_env)
        self._episodes = torch.zeros(len(self.envs), dtype=torch.long)
        self._clock, self._first_env = -1, 0
        self.render_modes = modes_of(env.env)

    def set_agent_offset(self, first_agent: int) -> None:
        """Seed the environments as a shard of a larger world that starts at this agent."""
        if first_agent % self.agents_per_env:
            raise ContractError(
                f"{self.name}: a shard starts at a multiple of {self.agents_per_env}, not {first_agent}."
            )
        self._first_env = first_agent // self.agents_per_env

    def reset(self) -> Step:
        """Start the first episode of every environment, the same one each time."""
        self._clock, self._episodes = 0, torch.zeros_like(self._episodes)
        rows = StepRows(self.agents)
        for number in range(len(self.envs)):
            self._reset_env(number, rows)
        # Memory of absent agents is cleared, too.
        rows.first[:] = True
        return self._make_step(rows)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Step every environment with the actions of its present agents; reset those that are empty."""
        if self._clock < 0:
            raise ContractError("Call reset() before the first step().")
        actions_of = np.split(self._action_converter.write(actions, self.agents), len(self.envs))
        self._clock += 1
        rows = StepRows(self.agents)
        for number, env in enumerate(self.envs):
            with self._error_context(number):
                acted = env.present
                outputs, _, over, *_ = self._agent_envs[number].step(actions_of[number])
                env.read_step(outputs, rows, acted)
            if over:
                self._episodes[number] += 1
                self._reset_env(number, rows)
        return self._make_step(rows)

    def _reset_env(self, number: int, rows: StepRows) -> None:
        with self._error_context(number):
            outputs, _ = self._agent_envs[number].reset(seed=self._seed_of(number))
            self.envs[number].read_reset(outputs, rows)

    def _seed_of(self, number: int, later: int = 0) -> int:
        env = torch.tensor(self._first_env + number)
        return int(rng.randint(SEEDS, self.seed, rng.STREAM_WORLD, env, self._episodes[number] + later))

    def state(self) -> dict[str, Any]:
        """Return the episode log of every environment."""
        if self._clock < 0:
            raise ContractError("Call reset() before state().")
        logs = [env.save() for env in self._agent_envs]
        return {"seed": self.seed, "clock": self._clock, "episodes": self._episodes.clone(), "envs": logs}

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Replay every environment's episode; where that is impossible, start its next one."""
        require_equal(state, "seed", self.seed)
        clock, episodes = get_field(state, "clock", int), get_tensor_like(state, "episodes", self._episodes)
        logs = require_episode_logs(get_field(state, "envs", list), self.envs[0].action_space, len(self.envs))
        self._clock, self._episodes = clock, episodes
        rows, reasons = StepRows(self.agents), list[str]()
        for number, (env, log) in enumerate(zip(self._agent_envs, logs, strict=True)):
            with self._error_context(number):
                reason, outputs = env.replay_episode(log, self._seed_of(number, later=1))
                reasons.append(reason)
                if reason:
                    self._episodes[number] += 1
                    self.envs[number].read_reset(outputs, rows)
        if not any(reasons):
            return None
        # Absent agents of a restarted environment are restarted, too.
        restarted = np.repeat([bool(reason) for reason in reasons], self.agents_per_env)
        text = f"{self.name}: {count_reasons(reasons, 'environments')}"
        return Restarted(torch.from_numpy(restarted).to(self.device), self._make_step(rows), text)

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()

    def render_frame(self, agent: int) -> np.ndarray | None:
        """Return a frame of an agent's environment, if it was made to render them."""
        with self._error_context(number := agent // self.agents_per_env):
            return frame_of(self.envs[number].env)

    def _make_step(self, rows: StepRows) -> Step:
        with self._error_context():
            obs = self._write_rows(zero_obs(self._obs_converter.space, self.agents), rows.obs)
            last_obs = self._write_rows(obs.clone(), rows.last) if rows.last else obs
        flags = rows.terminated, rows.truncated, rows.first, rows.valid
        return external_step(obs, last_obs, self.device, rows.reward, *flags)

    def _write_rows(self, obs: Obs, rows: Mapping[int, Any]) -> Obs:
        obs[torch.tensor(list(rows))] = cast("Any", self._obs_converter.read_rows(rows))
        return obs

    def _require_same_spaces(self) -> None:
        if len({id(env.env) for env in self.envs}) < len(self.envs):
            raise ConfigError(f"{self.name} returned the same environment twice; make a new one in each call.")
        first = self.envs[0]
        for env in self.envs:
            if (env.names, env.obs_space, env.act_space) != (first.names, first.obs_space, first.act_space):
                raise ConfigError(f"{self.name} makes environments with different agents or spaces.")

    @contextmanager
    def _error_context(self, number: int | None = None) -> Iterator[None]:
        """Turn any error into a ContractError with the environment, the agent and the step."""
        try:
            yield
        except HoldfastError:
            raise
        except EnvError as error:
            raise self._error(error.message, number, error.agent) from error.__cause__
        except Exception as error:
            raise self._error(located_error_text(error), number, None) from error

    def _error(self, message: str, number: int | None, row: int | None) -> ContractError:
        place = "" if number is None else f", environment {self._first_env + number}"
        if row is not None:
            env, index = divmod(row, self.agents_per_env)
            agent = self._first_env * self.agents_per_env + row
            place = f", agent {agent} ({self.envs[0].names[index]} of environment {self._first_env + env})"
        return ContractError(f"{self.name}{place}, step {self._clock}: {message}.")


class PettingZooWorld(ExternalWorld):
    """Parallel environments of several agents, all in one process.

    `env` is a module with `parallel_env` (`mpe2.simple_spread_v3`), or a function or class that makes a `ParallelEnv`
    (or its name `package.module:function`). It is made with `options` and wrapped in `wrappers`, innermost first.
    `agents` is a multiple of the number of `possible_agents` of one environment; rows follow their order.

    `keep` lists the indices of an observation vector to keep (empty: all). `previous_action`, `previous_reward` and
    `tell_first` add the last action, the last reward and `first` to the observation.

    Every episode is seeded by (seed, environment, episode) alone.
    """

    def __init__(
        self,
        agents: int,
        *,
        env: str | Callable[..., Any],
        seed: int = 0,
        device: Device = "cpu",
        options: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrap] = (),
        keep: Sequence[int] = (),
        previous_action: bool = False,
        previous_reward: bool = False,
        tell_first: bool = False,
    ) -> None:
        name, make_env = find_parallel_env(env, options or {}, wrappers)
        self._envs = ParallelEnvWorld(name, make_env, agents, seed=seed, device=device, keep=keep)
        super().__init__(
            self._envs, previous_action=previous_action, previous_reward=previous_reward, tell_first=tell_first
        )

    def set_agent_offset(self, first_agent: int) -> None:
        """Seed the environments as a shard of a larger world; call before `reset()`."""
        self._envs.set_agent_offset(first_agent)
