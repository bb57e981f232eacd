"""GymWorld: Gymnasium environments as a world; all three autoreset modes give the same valid steps."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from holdfast import rng
from holdfast.errors import ConfigError, ContractError, located_error_text
from holdfast.state_tree import get_field, get_tensor_like, require_equal
from holdfast.types import Shaped, Tensor
from holdfast.worlds.gym.episode_log import EnvError, count_reasons, require_episode_logs
from holdfast.worlds.gym.frames import frame_of, modes_of
from holdfast.worlds.gym.make_env import Autoreset, Vector, VectorEnvHandle, build_vector_env, close_env
from holdfast.worlds.gym.seed_episodes import SEEDS
from holdfast.worlds.gym.spaces import ActionConverter, ObsConverter, external_spec, external_step
from holdfast.worlds.gym.wrappers import Wrap
from holdfast.worlds.obs import Obs, where_obs
from holdfast.worlds.previous_inputs import ExternalWorld
from holdfast.worlds.step import Device, Restarted, Step

StepArrays = tuple[Obs, np.ndarray, np.ndarray, np.ndarray, Mapping[str, Any]]
"""Observations, rewards, terminated, truncated, and infos."""


def episode_starts(previous_ended: np.ndarray, ended: np.ndarray, agents: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the rows of a next-step reset: those whose episode ended one call before."""
    both = previous_ended & ended
    if both.any():
        agent = int(agents[int(both.argmax())])
        raise EnvError("its reset observation comes with terminated or truncated", agent)
    return previous_ended


class VectorEnvWorld:
    """A vector environment as a world.

    With same-step autoreset, or disabled autoreset (the world resets), the row in which an episode ends has
    the first observation of the next one, and the final observation in `last_obs`. With next-step autoreset
    that row has the final observation and is not `valid`, because its action is ignored; the next row is
    `first`. So every episode has the same valid steps in all modes.
    """

    def __init__(self, handle: VectorEnvHandle, *, seed: int, device: Device, keep: Sequence[int] = ()) -> None:
        self.name, self.env, self.mode = handle.name, handle.env, handle.mode
        self._agent_envs = handle.agent_envs
        self.agents = self.env.num_envs
        self.device = torch.device(device)
        self._obs_converter = ObsConverter(self.env.single_observation_space, self.name, keep)
        self._action_converter = ActionConverter(self.env.single_action_space, self.name)
        self.spec = external_spec(self.name, self._obs_converter, self._action_converter)
        self.seed, self._first_agent = seed, 0
        self._agent_ids = range(self.agents)
        # Their vector environment does the same, and takes twice as long for a few small ones.
        self._steps_envs = bool(self._agent_envs) and self.mode is AutoresetMode.SAME_STEP
        self._ended = np.zeros(self.agents, np.bool_)
        self._clock = -1
        # A native vector environment renders no frame of one agent.
        self.render_modes = modes_of(self.env) if self._agent_envs else ()

    def set_agent_offset(self, first_agent: int) -> None:
        """Seed the environments as a shard of a larger world; call before `reset()`."""
        if not self._agent_envs:
            raise ConfigError(
                f"{self.name} takes one seed for all of its environments, so it cannot be a shard; leave out "
                "world.vector=native, or trainer.num_workers."
            )
        self._first_agent = first_agent

    def reset(self) -> Step:
        """Start every agent's first episode, the same one each time."""
        self._clock = 0
        return self._reset_all()

    def _reset_all(self) -> Step:
        """Start an episode of every agent, seeded by (seed, agent, clock)."""
        seeds, self._ended = self._seeds(), np.zeros(self.agents, np.bool_)
        seed_list = isinstance(self.env.unwrapped, SyncVectorEnv | AsyncVectorEnv)
        with self._error_context():
            # A native vector environment takes one seed.
            batch, _ = self.env.reset(seed=cast("Any", seeds if seed_list else seeds[0]))
            obs = self._obs_converter.read(batch, self._agent_ids)
        ends, starts = np.zeros((2, self.agents), np.bool_), np.ones((2, self.agents), np.bool_)
        return external_step(obs, obs, self.device, np.zeros(self.agents, np.float32), *ends, *starts)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Step every environment with its agent's action."""
        if self._clock < 0:
            raise ContractError("Call reset() before the first step().")
        env_actions = self._action_converter.write(actions, self.agents)
        self._clock += 1
        with self._error_context():
            obs, reward, terminated, truncated, info = (
                self._step_envs(env_actions) if self._steps_envs else self._step_vector(env_actions)
            )
            ended = terminated | truncated
            if self.mode is AutoresetMode.NEXT_STEP:
                first, self._ended = episode_starts(self._ended, ended, self._agent_ids), ended
                reward[first] = 0
                last_obs, valid = obs, ~ended
            else:
                first, last_obs, valid = ended, obs, np.ones(self.agents, np.bool_)
                if ended.any():
                    obs, last_obs = self._split_last_obs(obs, info, ended)
        return external_step(obs, last_obs, self.device, reward, terminated, truncated, first, valid)

    def _step_vector(self, env_actions: np.ndarray) -> StepArrays:
        """Step the vector environment."""
        batch, reward, terminated, truncated, info = self.env.step(env_actions)
        terminated = self._column("terminated", terminated, np.bool_)
        truncated = self._column("truncated", truncated, np.bool_)
        obs, reward = self._obs_converter.read(batch, self._agent_ids), self._column("reward", reward, np.float32)
        return obs, reward, terminated, truncated, info

    def _step_envs(self, env_actions: np.ndarray) -> StepArrays:
        """Step each agent's environment, and reset it in the same step if its episode ends."""
        obs_of, final_obs = dict[int, Any](), [None] * self.agents
        rewards, flags = list[float](), list[tuple[bool, bool]]()
        for agent, (env, action) in enumerate(zip(self._agent_envs, env_actions, strict=True)):
            obs, reward, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                final_obs[agent] = obs
                obs, _ = env.reset()
            obs_of[agent] = obs
            rewards.append(reward)
            flags.append((terminated, truncated))
        terminated, truncated = np.array(flags, np.bool_).T.copy()
        info = {"final_obs": final_obs}
        obs, reward = self._obs_converter.read_rows(obs_of), np.array(rewards, np.float32)
        return obs, reward, terminated, truncated, info

    def _seeds(self) -> list[int]:
        agents = torch.arange(self._first_agent, self._first_agent + self.agents)
        return rng.randint(SEEDS, self.seed, rng.STREAM_WORLD, agents, max(self._clock, 0)).tolist()

    def state(self) -> dict[str, Any]:
        """Return the episode log of every environment; native vector environments have none."""
        if self._clock < 0:
            raise ContractError("Call reset() before state().")
        with self._error_context():
            envs = [env.save() for env in self._agent_envs] or None
        return {
            "seed": self.seed,
            "mode": self.mode.name,
            "clock": self._clock,
            "ended": torch.from_numpy(self._ended.copy()),
            "envs": envs,
        }

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Replay every environment's episode; where that is impossible, start a new one."""
        require_equal(state, "seed", self.seed)
        require_equal(state, "mode", self.mode.name)
        clock = get_field(state, "clock", int)
        ended = get_tensor_like(state, "ended", torch.zeros(self.agents, dtype=torch.bool)).numpy()
        logs = cast("Any", get_field(state, "envs", object))
        if logs is not None and self._agent_envs:
            logs = require_episode_logs(logs, self.env.single_action_space, self.agents)
        # Reset all first, so that no autoreset is pending and every environment has a generator.
        self._clock = 0
        step = self._reset_all()
        self._clock = clock
        if logs is None or not self._agent_envs:
            reason = f"{self.name} cannot save the state of its environments"
            return Restarted(torch.ones_like(step.first), self._reset_all(), reason)
        self._ended = ended
        with self._error_context():
            replays = [
                env.replay_episode(log, seed)
                for env, log, seed in zip(self._agent_envs, logs, self._seeds(), strict=True)
            ]
            rows = {agent: obs for agent, (reason, obs) in enumerate(replays) if reason}
            if not rows:
                return None
            agents, obs, mask = torch.tensor(list(rows)), step.obs.clone(), torch.zeros_like(step.first)
            obs[agents], mask[agents] = cast("Any", self._obs_converter.read_rows(rows).to(self.device)), True
        self._ended[agents.numpy()] = False
        reasons = count_reasons([reason for reason, _ in replays], "agents")
        return Restarted(mask, replace(step, obs=obs, last_obs=obs), f"{self.name}: {reasons}")

    def close(self) -> None:
        """Close the environments."""
        close_env(self.env)

    def render_frame(self, agent: int) -> np.ndarray | None:
        """Return a frame of an agent's environment, if it was made to render them."""
        if not self._agent_envs:
            return None
        with self._error_context():
            return frame_of(self._agent_envs[agent], agent)

    def _split_last_obs(self, obs: Obs, info: Mapping[str, Any], ended: np.ndarray) -> tuple[Obs, Obs]:
        """Return the current observations, and those with the final ones of episodes that ended."""
        if self.mode is AutoresetMode.SAME_STEP:
            return obs, self._final_obs(obs, info.get("final_obs"), info.get("_final_obs", ended), ended)
        batch, _ = self.env.reset(options={"reset_mask": ended.copy()})
        reset_obs = self._obs_converter.read(batch, self._agent_ids)
        return where_obs(torch.from_numpy(ended), reset_obs, obs), obs

    def _final_obs(self, obs: Obs, final: Any, present: np.ndarray, ended: np.ndarray) -> Obs:
        """Read `info["final_obs"]`, an array of objects by agent or a batch."""
        by_agent = isinstance(final, list) or (isinstance(final, np.ndarray) and final.dtype == object)
        rows = {int(agent): final[agent] if by_agent else final for agent in ended.nonzero()[0]}
        missing = [agent for agent, last in rows.items() if last is None or not present[agent]]
        if missing:
            raise EnvError("its episode ended with same-step autoreset, but info['final_obs'] has none", missing[0])
        if not by_agent:
            return where_obs(torch.from_numpy(ended), self._obs_converter.read(final, self._agent_ids), obs)
        last_obs = obs.clone()
        last_obs[torch.tensor(list(rows))] = cast("Any", self._obs_converter.read_rows(rows))
        return last_obs

    def _column(self, name: str, values: Any, dtype: type[np.generic]) -> np.ndarray:
        if np.asarray(values).dtype.kind not in "fiub":
            # None would silently become False or NaN.
            agent = next((number for number, value in enumerate(values) if value is None), None)
            raise EnvError(f"{name} is {values}; it must be a number, True or False for each agent", agent)
        column = np.array(values, dtype=dtype)
        if column.shape != (self.agents,):
            raise EnvError(f"{name} is {list(column.shape)}; there are {self.agents} agents")
        return column

    @contextmanager
    def _error_context(self) -> Iterator[None]:
        """Turn any error into a ContractError with the agent and the step."""
        try:
            yield
        except EnvError as error:
            raise self._error(error) from error.__cause__
        except Exception as error:
            raise self._error(self._find_mismatch() or EnvError(located_error_text(error))) from error

    def _find_mismatch(self) -> EnvError | None:
        """Return an error for the first environment whose observation does not fit its space."""
        for env in self._agent_envs:
            reason = self._obs_converter.mismatch(env.obs)
            if reason:
                return EnvError(reason, env.agent)
        return None

    def _error(self, error: EnvError) -> ContractError:
        agent = "" if error.agent is None else f", agent {self._first_agent + error.agent}"
        return ContractError(f"{self.name}{agent}, step {self._clock}: {error.message}.")


class GymWorld(ExternalWorld):
    """One Gymnasium environment per agent, all in one process.

    `env` is an id (`CartPole-v1`, `module:ID`), a class or function (or its name `package.module:Class`), or
    an existing vector environment. It is made with `options` and wrapped in `wrappers`, innermost first.
    `vector="native"` uses the vector implementation that the environment registers. `autoreset` is the
    autoreset mode; `auto` is same_step for environments made here, else the declared one. All modes give the
    same steps, except for rows that are not `valid`.

    `keep` lists the indices of an observation vector to keep (empty: all). `frame_stack` is the number of
    observations of an episode that are stacked. `previous_action`, `previous_reward` and `tell_first` add the
    last action, the last reward and `first` to the observation.

    Agent i's environment is seeded by (seed, i) alone; a native vector environment takes one seed for all.
    """

    def __init__(
        self,
        agents: int,
        *,
        env: str | Callable[..., gymnasium.Env[Any, Any]] | VectorEnv[Any, Any, Any],
        seed: int = 0,
        device: Device = "cpu",
        vector: Vector = "sync",
        autoreset: Autoreset = "auto",
        options: Mapping[str, Any] | None = None,
        wrappers: Sequence[Wrap] = (),
        frame_stack: int = 1,
        keep: Sequence[int] = (),
        previous_action: bool = False,
        previous_reward: bool = False,
        tell_first: bool = False,
    ) -> None:
        handle = build_vector_env(
            env,
            agents,
            vector=vector,
            autoreset=autoreset,
            options=options or {},
            wrappers=wrappers,
            frame_stack=frame_stack,
            keep=keep,
        )
        # Stacks have been made of the entries to keep.
        keep = () if frame_stack > 1 else keep
        self._vector = VectorEnvWorld(handle, seed=seed, device=device, keep=keep)
        super().__init__(
            self._vector, previous_action=previous_action, previous_reward=previous_reward, tell_first=tell_first
        )

    def set_agent_offset(self, first_agent: int) -> None:
        """Seed the environments as a shard of a larger world; call before `reset()`."""
        self._vector.set_agent_offset(first_agent)
