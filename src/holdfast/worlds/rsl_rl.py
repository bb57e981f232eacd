"""Environments with rsl_rl's `VecEnv` interface, which Isaac Lab and mjlab have: tensors on one device."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast
from warnings import warn

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field
from tensordict import TensorDict, TensorDictBase

from holdfast.config.base import NameList, Options
from holdfast.config.worlds import Family, WorldConfig
from holdfast.errors import AgentCountError, ConfigError, ContractError, HoldfastError, MakeError, located_error_text
from holdfast.registry import import_object
from holdfast.trust import require_trust_to_call
from holdfast.types import Float, Tensor
from holdfast.worlds.obs import Obs, check_actions
from holdfast.worlds.step import Device, Step, WorldSpec

METHODS = ("num_envs", "num_actions", "get_observations", "step")
ACTOR_GROUPS = ("actor", "policy")
"""Groups that rsl_rl gives to the actor when its configuration names none."""
FINAL_OBS = "final_obs"
"""Where `extras` may have the observations before the reset; the name is Gymnasium's."""


class RslRlConfig(WorldConfig):
    """An environment with rsl_rl's VecEnv interface (Isaac Lab, mjlab): rsl_rl:package.module:make_env."""

    family: ClassVar[Family] = Family("holdfast.worlds.rsl_rl:RslRlWorld", ids="package.module:make_env", max_shards=1)
    name: str = Field(description="name of the world")
    options: Options = Field(default={}, description="arguments of the function, as in '{task: Pole}'")
    groups: NameList = Field(
        default=(), description="observation groups the policy reads (none: actor or policy, if there is one, else all)"
    )
    clip_actions: float = Field(default=1.0, gt=0, description="actions lie in [-x,x]")


class RslRlWorld:
    """A `VecEnv` as a world, on its device. `time_outs` of its extras are truncations.

    A `VecEnv` resets within a step and returns the next episode's observation. The last observation of a truncated
    episode is `extras["final_obs"]` if the environment gives it; else it is the one before the last action.
    """

    def __init__(
        self,
        agents: int,
        *,
        env: str,
        options: Mapping[str, Any] | None = None,
        groups: Sequence[str] = (),
        clip_actions: float = 1.0,
        seed: int = 0,
        device: Device = "cpu",
    ) -> None:
        self.name, self.agents = f"rsl_rl:{env}", agents
        self._device = torch.device(device)
        make = import_object(env, "world.name=rsl_rl:")
        require_trust_to_call(env, make)
        arguments = {"num_envs": agents, "seed": seed, "device": str(device)}
        self.env = self._make(make, dict(options or {}), arguments)
        self._obs_groups = groups
        obs = self._read_obs(self.env.get_observations())
        self._previous_obs, self._has_warned = obs, False
        action = spaces.Box(-clip_actions, clip_actions, (int(self.env.num_actions),), np.float32)
        space = _space_of(obs)
        self.spec = WorldSpec(
            obs_shape=() if isinstance(space, spaces.Dict) else cast("tuple[int, ...]", space.shape),
            action_names=(),
            truncates="always",
            observation=space,
            action=action,
            name=self.name,
        )

    def reset(self) -> Step:
        """Start an episode of every environment, by its `reset()` if it has one."""
        reset = getattr(self.env, "reset", None)
        result = self.env.get_observations() if reset is None else reset()
        self._previous_obs = self._read_obs(result)
        reward = torch.zeros(self.agents, device=self._device)
        flags = torch.zeros(self.agents, dtype=torch.bool, device=self._device)
        return Step(self._previous_obs, reward, flags, flags, ~flags, ~flags, flags, self._previous_obs)

    def step(self, actions: Float[Tensor, "A n"]) -> Step:
        """Take one action per environment."""
        check_actions(actions, self.agents, cast("spaces.Box", self.spec.action))
        # Environments may clip their actions in place, and a rollout needs them as they were.
        with torch.no_grad():
            result = self.env.step(actions.clone().to(self.env.device))
        if not isinstance(result, tuple) or len(result) != 4 or not isinstance(result[3], Mapping):
            raise ContractError(f"{self.name}: step must return (obs, rewards, dones, extras).")
        obs, reward, dones, extras = result
        obs = self._read_obs(obs)
        done = self._row("dones", dones) != 0
        truncated = self._row("time_outs", extras["time_outs"]) != 0 if "time_outs" in extras else done & ~done
        truncated = truncated & done
        last_obs = self._last_obs(extras)
        self._previous_obs = obs
        no_trial = torch.zeros_like(done)
        reward = self._row("rewards", reward).float()
        return Step(obs, reward, done & ~truncated, truncated, done, ~no_trial, no_trial, last_obs)

    def close(self) -> None:
        """Close the environment, if it can be closed."""
        close = getattr(self.env, "close", None)
        if close is not None:
            close()

    def _make(self, make: Any, options: dict[str, Any], arguments: Mapping[str, Any]) -> Any:
        """Call the function, with the number of environments, seed and device where it takes them."""
        if callable(make):
            try:
                parameters = inspect.signature(make).parameters
            except ValueError:
                raise ConfigError(f"{self.name}: {make!r} has no signature to read its arguments from.") from None
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            accepted = {key: value for key, value in arguments.items() if takes_any or key in parameters}
            try:
                make = make(**{**accepted, **options})
            except HoldfastError:
                raise
            except Exception as error:
                raise MakeError(f"{self.name} cannot be made: {located_error_text(error)}.") from error
        missing = [name for name in METHODS if getattr(make, name, None) is None]
        if missing:
            raise ConfigError(f"{self.name} makes {make!r}; a VecEnv of rsl_rl has {', '.join(missing)}.")
        if make.num_envs != self.agents:
            raise AgentCountError(
                f"{self.name} has {make.num_envs} environments; world.agents={self.agents}. Type "
                f"world.agents={make.num_envs}, or let the function take num_envs.",
                int(make.num_envs),
            )
        return make

    def _read_obs(self, result: Any) -> Obs:
        """Return the groups that the policy reads as a tensor or TensorDict, copied: environments overwrite theirs."""
        # Some return (obs, extras) here.
        obs = result[0] if isinstance(result, tuple) else result
        if isinstance(obs, Tensor):
            if self._obs_groups:
                raise ConfigError(f"{self.name}: world.groups={','.join(self._obs_groups)}, but it has no groups.")
            return self._copy(obs)
        if not isinstance(obs, Mapping | TensorDictBase):
            raise ContractError(f"{self.name}: observations are {type(obs).__name__}; must be a tensor or TensorDict.")
        leaves = {str(name): leaf for name, leaf in obs.items()}
        names = self._obs_groups or [name for name in ACTOR_GROUPS if name in leaves][:1] or list(leaves)
        unknown = [name for name in names if name not in leaves]
        if unknown:
            raise ConfigError(f"{self.name}: world.groups: no group {', '.join(unknown)}; it has {', '.join(leaves)}.")
        copied = {name: self._copy(leaves[name]) for name in names}
        return copied[names[0]] if len(names) == 1 else TensorDict(copied, batch_size=[self.agents])

    def _copy(self, leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor) or leaf.shape[:1] != (self.agents,):
            shape = list(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            raise ContractError(f"{self.name}: an observation is {shape}; must be a tensor [{self.agents}, ...].")
        # A tensor that is made in inference mode cannot be used in training.
        return leaf.to(self._device, copy=True)

    def _row(self, name: str, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.numel() != self.agents:
            raise ContractError(f"{self.name}: {name} must be a tensor [{self.agents}].")
        return value.reshape(self.agents).to(self._device, copy=True)

    def _last_obs(self, extras: Mapping[str, Any]) -> Obs:
        if FINAL_OBS in extras:
            return self._read_obs(extras[FINAL_OBS])
        if "time_outs" in extras and not self._has_warned:
            self._has_warned = True
            warn(
                f"{self.name}: the reset loses the last observation of an episode that runs out of time, so its "
                f"value is that of the observation one step before; extras[{FINAL_OBS!r}] would give it.",
                stacklevel=2,
            )
        return self._previous_obs


def _space_of(obs: Obs) -> spaces.Space[Any]:
    """Return a space without bounds for the observations of an environment, which has none."""
    if isinstance(obs, TensorDictBase):
        return spaces.Dict({str(name): _space_of(cast("Tensor", leaf)) for name, leaf in obs.items()})
    if obs.is_floating_point():
        return spaces.Box(-np.inf, np.inf, tuple(obs.shape[1:]), np.float32)
    dtype = np.dtype(str(obs.dtype).removeprefix("torch."))
    limits = (0, 1) if obs.dtype == torch.bool else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return spaces.Box(limits[0], limits[1], tuple(obs.shape[1:]), dtype.type)
