"""What an agent did and got, and that an episode begins, shown beside what its world shows."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast.errors import ConfigError, ContractError
from holdfast.saved import taken, tensor_like
from holdfast.shapes import Bool, Float, Shaped, Tensor
from holdfast.worlds.going_on import put_back, state_of
from holdfast.worlds.seen import Seen
from holdfast.worlds.step import Anew, Step, World, WorldSpec


def with_inputs(world: World, *, previous_action: bool, previous_reward: bool, tell_first: bool) -> World:
    """Show beside what a world shows what is wanted; if that is nothing, leave it as it is."""
    if not (previous_action or previous_reward or tell_first):
        return world
    return WithInputs(
        world, previous_action=previous_action, previous_reward=previous_reward, tell_first=tell_first
    )


class WithInputs:
    """A world that also shows the action and the reward before an observation, or whether it is a first one.

    What its world shows is then `obs` of a Dict, beside `previous_action`, `previous_reward` and `first`. A
    choice is shown as one-hot, several one after the other; numbers are shown as the world clips them. In the
    first row of an episode nothing was done before: zeros. What is done where nobody acts is no action: until
    the next one, the last counts. The last observation of a truncated episode carries what led there.
    """

    def __init__(
        self, world: World, *, previous_action: bool, previous_reward: bool, tell_first: bool
    ) -> None:
        if world.spec.features:
            raise ConfigError(
                "This world shows tokens; previous_action, previous_reward and tell_first go with other "
                "observations. Leave them out."
            )
        self.world, self.agents = world, world.agents
        self._low, self._high = _walls(world.spec)
        shown = {
            "previous_action": (previous_action, spaces.Box(self._low, self._high, dtype=np.float32)),
            "previous_reward": (previous_reward, spaces.Box(-np.inf, np.inf, (1,), np.float32)),
            "first": (tell_first, spaces.Box(0, 1, (1,), np.float32)),
        }
        self._shown = {name: space for name, (wanted, space) in shown.items() if wanted}
        sight = spaces.Dict({"obs": world.spec.sight, **self._shown})
        self.spec = replace(world.spec, obs_shape=(), observation=sight)
        self._action = self._reward = self._acted = torch.zeros(0)

    def reset(self) -> Step:
        """Start every agent's first episode, with nothing done before."""
        step = self.world.reset()
        self._action = step.reward.new_zeros(self.agents, len(self._low))
        self._reward = step.reward.new_zeros(self.agents, 1)
        return self._tell(step, self._action, self._reward)

    def step(self, actions: Shaped[Tensor, "A ..."]) -> Step:
        """Let the world take the actions, and show them with what came of them."""
        if not len(self._action):
            raise ContractError("Call reset() before the first step().")
        step = self.world.step(actions)
        self._lie_on(step.reward.device)
        acted = self._acted[:, None]
        action = torch.where(acted, self._as_numbers(actions), self._action)
        reward = torch.where(acted, step.reward[:, None], self._reward)
        return self._tell(step, action, reward)

    def state(self) -> dict[str, Any] | None:
        """Say where its world is, and what was shown beside it."""
        world = state_of(self.world)
        if world is None:
            return None
        if not len(self._action):
            raise ContractError("Call reset() before state().")
        own = {"action": self._action, "reward": self._reward, "acted": self._acted}
        return {"world": world, **{name: each.clone() for name, each in own.items()}}

    def restore(self, state: Mapping[str, Any]) -> Anew | None:
        """Go on from there; who begins anew did nothing before."""
        action = tensor_like(state, "action", torch.zeros(self.agents, len(self._low)))
        reward = tensor_like(state, "reward", torch.zeros(self.agents, 1))
        acted = tensor_like(state, "acted", torch.zeros(self.agents, dtype=torch.bool))
        anew = put_back(self.world, taken(state, "world", dict))
        self._action, self._reward, self._acted = action, reward, acted
        if anew is None:
            return None
        self._lie_on(anew.who.device)
        acted = self._acted
        told = self._tell(replace(anew.step, first=anew.who), self._action, self._reward)
        self._acted = torch.where(anew.who, anew.step.valid, acted)
        return replace(anew, step=told)

    def _lie_on(self, device: torch.device) -> None:
        """Go to where the world speaks: a state may have been kept elsewhere."""
        self._action, self._reward, self._acted = (
            each.to(device) for each in (self._action, self._reward, self._acted)
        )

    def _tell(self, step: Step, action: Float[Tensor, "A n"], reward: Float[Tensor, "A 1"]) -> Step:
        """Show what led here, but nothing where an episode begins; and remember it."""
        first = step.first[:, None]
        last = step.last_obs
        if last is not None:
            last = self._beside(last, action, reward, torch.zeros_like(step.first))
        self._action, self._reward = torch.where(first, 0.0, action), torch.where(first, 0.0, reward)
        self._acted = step.valid
        obs = self._beside(step.obs, self._action, self._reward, step.first)
        return replace(step, obs=obs, last_obs=last)

    def _beside(
        self, obs: Seen, action: Float[Tensor, "A n"], reward: Float[Tensor, "A 1"], first: Bool[Tensor, " A"]
    ) -> TensorDict:
        every = {"previous_action": action, "previous_reward": reward, "first": first[:, None].float()}
        return TensorDict({"obs": obs, **{name: every[name] for name in self._shown}}, [self.agents])

    def _as_numbers(self, actions: Shaped[Tensor, "A ..."]) -> Float[Tensor, "A n"]:
        """Write actions as numbers: choices as one-hot, numbers clipped to their box."""
        space = self.spec.action
        if isinstance(space, spaces.Box):
            low, high = (torch.as_tensor(wall, device=actions.device) for wall in (self._low, self._high))
            return actions.float().clamp(low, high)
        counts = [len(self.spec.action_names)] if space is None else space.nvec.tolist()
        parts = actions.long().reshape(self.agents, len(counts)).unbind(1)
        one_hot = torch.nn.functional.one_hot
        return torch.cat([one_hot(part, n) for part, n in zip(parts, counts, strict=True)], dim=1).float()


def _walls(spec: WorldSpec) -> tuple[np.ndarray, np.ndarray]:
    """Say between which numbers an action written as numbers lies."""
    if isinstance(spec.action, spaces.Box):
        return spec.action.low.astype(np.float32), spec.action.high.astype(np.float32)
    count = len(spec.action_names) if spec.action is None else int(spec.action.nvec.sum())
    return np.zeros(count, np.float32), np.ones(count, np.float32)
