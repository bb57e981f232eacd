"""Wrapper that adds the previous action, previous reward and episode start to observations."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast.errors import ConfigError, ContractError
from holdfast.state_tree import get_field, get_tensor_like
from holdfast.types import Bool, Float, Shaped, Tensor
from holdfast.worlds.obs import Obs
from holdfast.worlds.save_restore import restore_world, save_world
from holdfast.worlds.step import Closeable, Rendering, Restarted, Step, World, WorldSpec


class WithPreviousInputs:
    """A world whose observations also have the previous action, the previous reward or the episode start.

    The observation is a Dict of `obs`, `previous_action`, `previous_reward` and `first`. Discrete actions are one-hot,
    concatenated for MultiDiscrete; actions of a Box are clipped. The first row of an episode has zeros. Actions in
    invalid rows are ignored: the last valid one counts. `last_obs` has the action and reward that led to it.
    """

    def __init__(self, world: World, *, previous_action: bool, previous_reward: bool, tell_first: bool) -> None:
        if world.spec.features:
            raise ConfigError("This world has tokens; leave out previous_action, previous_reward, tell_first.")
        self.world, self.agents = world, world.agents
        self._low, self._high = _action_bounds(world.spec)
        inputs = {
            "previous_action": (previous_action, spaces.Box(self._low, self._high, dtype=np.float32)),
            "previous_reward": (previous_reward, spaces.Box(-np.inf, np.inf, (1,), np.float32)),
            "first": (tell_first, spaces.Box(0, 1, (1,), np.float32)),
        }
        self._input_spaces = {name: space for name, (enabled, space) in inputs.items() if enabled}
        observation = spaces.Dict({"obs": world.spec.observation_space, **self._input_spaces})
        self.spec = replace(world.spec, obs_shape=(), observation=observation)
        self._action = self._reward = self._acted = torch.zeros(0)

    def reset(self) -> Step:
        """Start every agent's first episode, with zeros as previous inputs."""
        step = self.world.reset()
        self._action = step.reward.new_zeros(self.agents, len(self._low))
        self._reward = step.reward.new_zeros(self.agents, 1)
        return self._make_step(step, self._action, self._reward)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Step the world; the actions and their rewards are the previous inputs of the new observations."""
        if not len(self._action):
            raise ContractError("Call reset() before the first step().")
        step = self.world.step(actions)
        self._to(step.reward.device)
        acted = self._acted[:, None]
        action = torch.where(acted, self._encode(actions), self._action)
        reward = torch.where(acted, step.reward[:, None], self._reward)
        return self._make_step(step, action, reward)

    def state(self) -> dict[str, Any] | None:
        """Return the state of the world and the previous inputs."""
        world = save_world(self.world)
        if world is None:
            return None
        if not len(self._action):
            raise ContractError("Call reset() before state().")
        tensors = {"action": self._action, "reward": self._reward, "acted": self._acted}
        return {"world": world, **{name: tensor.clone() for name, tensor in tensors.items()}}

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Restore the world and the previous inputs; those of restarted agents are zeros."""
        action = get_tensor_like(state, "action", torch.zeros(self.agents, len(self._low)))
        reward = get_tensor_like(state, "reward", torch.zeros(self.agents, 1))
        acted = get_tensor_like(state, "acted", torch.zeros(self.agents, dtype=torch.bool))
        restarted = restore_world(self.world, get_field(state, "world", dict))
        self._action, self._reward, self._acted = action, reward, acted
        if restarted is None:
            return None
        self._to(restarted.mask.device)
        acted = self._acted
        step = self._make_step(replace(restarted.step, first=restarted.mask), self._action, self._reward)
        self._acted = torch.where(restarted.mask, restarted.step.valid, acted)
        return replace(restarted, step=step)

    def _to(self, device: torch.device) -> None:
        """Move to the device of the world; a restored state may be on another one."""
        self._action, self._reward = self._action.to(device), self._reward.to(device)
        self._acted = self._acted.to(device)

    def _make_step(self, step: Step, action: Float[Tensor, "A n"], reward: Float[Tensor, "A 1"]) -> Step:
        """Add the previous inputs, zeros at episode starts, and store them."""
        first = step.first[:, None]
        last_obs = step.last_obs
        if last_obs is not None:
            last_obs = self._add_inputs(last_obs, action, reward, torch.zeros_like(step.first))
        self._action, self._reward = torch.where(first, 0.0, action), torch.where(first, 0.0, reward)
        self._acted = step.valid
        obs = self._add_inputs(step.obs, self._action, self._reward, step.first)
        return replace(step, obs=obs, last_obs=last_obs)

    def _add_inputs(
        self, obs: Obs, action: Float[Tensor, "A n"], reward: Float[Tensor, "A 1"], first: Bool[Tensor, " A"]
    ) -> TensorDict:
        inputs = {"previous_action": action, "previous_reward": reward, "first": first[:, None].float()}
        return TensorDict({"obs": obs, **{name: inputs[name] for name in self._input_spaces}}, [self.agents])

    def _encode(self, actions: Shaped[Tensor, "A ..."]) -> Float[Tensor, "A n"]:
        """Return discrete actions as one-hot, others clipped to their Box."""
        space = self.spec.action
        if isinstance(space, spaces.Box):
            low, high = (torch.as_tensor(bound, device=actions.device) for bound in (self._low, self._high))
            return actions.float().clamp(low, high)
        counts = [len(self.spec.action_names)] if space is None else space.nvec.tolist()
        columns = actions.long().reshape(self.agents, len(counts)).unbind(1)
        one_hot = torch.nn.functional.one_hot
        return torch.cat([one_hot(column, n) for column, n in zip(columns, counts, strict=True)], 1).float()


def _action_bounds(spec: WorldSpec) -> tuple[np.ndarray, np.ndarray]:
    """Return the lower and upper bounds of an encoded action."""
    if isinstance(spec.action, spaces.Box):
        return spec.action.low.astype(np.float32), spec.action.high.astype(np.float32)
    count = len(spec.action_names) if spec.action is None else int(spec.action.nvec.sum())
    return np.zeros(count, np.float32), np.ones(count, np.float32)


class EnvWorld(World, Closeable, Protocol):
    """A closeable world with a name."""

    name: str


class ExternalWorld:
    """Base of adapters: a world of environments, with previous inputs if enabled."""

    def __init__(self, inside: EnvWorld, *, previous_action: bool, previous_reward: bool, tell_first: bool) -> None:
        inputs = {"previous_action": previous_action, "previous_reward": previous_reward, "tell_first": tell_first}
        self._env_world = inside
        self._world: World = WithPreviousInputs(inside, **inputs) if any(inputs.values()) else inside
        self.agents, self.spec, self.name = inside.agents, self._world.spec, inside.name
        self.render_modes = inside.render_modes if isinstance(inside, Rendering) else ()

    def reset(self) -> Step:
        """Start every agent's first episode; it is the same every time."""
        return self._world.reset()

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Take one action per agent, `[A]` or `[A,n]`; actions in invalid rows are ignored."""
        return self._world.step(actions)

    def state(self) -> dict[str, Any] | None:
        """Return the state of every environment."""
        return save_world(self._world)

    def restore(self, state: Mapping[str, Any]) -> Restarted | None:
        """Restore every environment that can be restored."""
        return restore_world(self._world, state)

    def close(self) -> None:
        """Close the environments."""
        self._env_world.close()

    def render_frame(self, agent: int) -> np.ndarray | None:
        """Return a frame of an agent's environment."""
        return self._env_world.render_frame(agent) if isinstance(self._env_world, Rendering) else None
