"""The script as environments of Gymnasium, Stable-Baselines3, rsl_rl and TorchRL."""

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from holdfast.check.trainer.script import ACTIONS, TrainerScript
from holdfast.errors import ConfigError, ContractError


class GymEnvs(VectorEnv):
    """A Gymnasium vector environment that resets in the same step, with `final_obs` in its info."""

    def __init__(self, script: TrainerScript) -> None:
        self.script, self.num_envs, self.render_mode = script, script.envs, None
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (script.width,), np.float32)
        self.single_action_space = gymnasium.spaces.Discrete(ACTIONS)
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, script.envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, script.envs)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Start all environments."""
        return self.script.observations(self.script.reset()), {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Take one step; actions have no effect."""
        if len(actions) != self.num_envs:
            raise ContractError(f"The trainer gave {len(actions)} actions for {self.num_envs} environments.")
        step, info = self.script.step(), {}
        if step.ended.any():
            finals = np.full(self.num_envs, None, dtype=object)
            for env in np.flatnonzero(step.ended):
                finals[env] = self.script.observations(step.final_ids)[env]
            info = {"final_obs": finals, "_final_obs": step.ended, "final_info": {}, "_final_info": step.ended}
        obs = self.script.observations(step.next_ids)
        return obs, step.reward.astype(np.float64), step.terminated.copy(), step.truncated.copy(), info


def sb3_envs(script: TrainerScript) -> Any:
    """Return the script as a `VecEnv` of Stable-Baselines3."""
    from stable_baselines3.common.vec_env import VecEnv  # pyright: ignore[reportMissingImports]

    class ScriptedVecEnv(VecEnv):
        def __init__(self) -> None:
            envs = GymEnvs(script)
            super().__init__(script.envs, envs.single_observation_space, envs.single_action_space)

        def reset(self) -> Any:
            return script.observations(script.reset())

        def step_async(self, actions: Any) -> None:
            pass

        def step_wait(self) -> Any:
            step = script.step()
            finals, infos = script.observations(step.final_ids), []
            for env in range(script.envs):
                info: dict[str, Any] = {"TimeLimit.truncated": bool(step.truncated[env] and not step.terminated[env])}
                if step.ended[env]:
                    info["terminal_observation"] = finals[env]
                infos.append(info)
            # sb3 adds bootstrap values to the rewards in place.
            return script.observations(step.next_ids), step.reward.copy(), step.ended, infos

        def close(self) -> None:
            pass

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * len(list(self._get_indices(indices)))

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            pass

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            return [None] * len(list(self._get_indices(indices)))

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * len(list(self._get_indices(indices)))

    return ScriptedVecEnv()


def rsl_rl_envs(script: TrainerScript) -> Any:
    """Return the script as a `VecEnv` of rsl_rl, which hands over no final observations."""
    from rsl_rl.env import VecEnv  # pyright: ignore[reportMissingImports]
    from tensordict import TensorDict

    class ScriptedRslEnv(VecEnv):
        def __init__(self) -> None:
            self.num_envs, self.num_actions, self.max_episode_length = script.envs, ACTIONS, 1000
            self.episode_length_buf = torch.zeros(script.envs, dtype=torch.long)
            self.device, self.cfg = "cpu", {}
            script.reset()

        def _observations(self) -> Any:
            rows = torch.from_numpy(script.observations(script.current))
            return TensorDict({"policy": rows}, batch_size=[script.envs])

        def get_observations(self) -> Any:
            return self._observations()

        def step(self, actions: Any) -> Any:
            step = script.step()
            extras = {"time_outs": torch.from_numpy(step.truncated & ~step.terminated)}
            return self._observations(), torch.tensor(step.reward), torch.tensor(step.ended), extras

    return ScriptedRslEnv()


def torchrl_envs(script: TrainerScript) -> Any:
    """Return the script as an `EnvBase` of TorchRL, whose next observation at an episode's end is the final one."""
    from tensordict import TensorDict
    from torchrl.data import Categorical, Composite, Unbounded  # pyright: ignore[reportMissingImports]
    from torchrl.envs import EnvBase  # pyright: ignore[reportMissingImports]

    class ScriptedTorchRLEnv(EnvBase):
        def __init__(self) -> None:
            envs = script.envs
            super().__init__(device="cpu", batch_size=[envs])
            self.num_envs = envs
            self.observation_spec = Composite(observation=Unbounded((envs, script.width)), shape=[envs])
            self.action_spec = Categorical(ACTIONS, shape=(envs,))
            self.reward_spec = Unbounded((envs, 1))
            flag = Categorical(2, shape=(envs, 1), dtype=torch.bool)
            flags = {name: flag.clone() for name in ("done", "terminated", "truncated")}
            self.done_spec = Composite(flags, shape=[envs])

        def _reset(self, tensordict: Any = None, **options: Any) -> Any:
            # A partial reset, which TorchRL masks, takes the first observations that the step has drawn.
            partial = tensordict is not None and tensordict.get("_reset", None) is not None
            ids, never = script.current if partial else script.reset(), np.zeros(script.envs, dtype=bool)
            return self._read(ids, never, never)

        def _step(self, tensordict: Any) -> Any:
            step = script.step()
            ids = np.where(step.ended, step.final_ids, step.next_ids)
            td = self._read(ids, step.terminated, step.truncated)
            return td.set("reward", torch.tensor(step.reward)[:, None])

        def _read(self, ids: Any, terminated: Any, truncated: Any) -> Any:
            flags = {"done": terminated | truncated, "terminated": terminated, "truncated": truncated}
            columns = {name: torch.tensor(flag)[:, None] for name, flag in flags.items()}
            return TensorDict({"observation": torch.tensor(script.observations(ids)), **columns}, self.batch_size)

        def _set_seed(self, seed: int | None) -> None:
            """Do nothing: the script is fixed."""

    return ScriptedTorchRLEnv()


def _need(name: str, package: str, make: Callable[[TrainerScript], Any]) -> Callable[[TrainerScript], Any]:
    """Say which package an interface needs."""

    def maker(script: TrainerScript) -> Any:
        try:
            return make(script)
        except ImportError as error:
            raise ConfigError(f"--interface {name} needs {package}; type: pip install {package}") from error

    return maker


INTERFACES: dict[str, Callable[[TrainerScript], Any]] = {
    "gym": GymEnvs,
    "sb3": _need("sb3", "sb3-contrib", sb3_envs),
    "rsl_rl": _need("rsl_rl", "rsl-rl-lib", rsl_rl_envs),
    "torchrl": _need("torchrl", "torchrl", torchrl_envs),
}
