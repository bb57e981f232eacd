"""Rewards as the learner sees them: clipped, and divided by the running deviation of discounted returns."""

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.errors import ContractError
from holdfast.policies.normalization import CLIP, RunningStats
from holdfast.rollout import Segments
from holdfast.rollout.segments import reverse_scan, shift_left
from holdfast.state_tree import get_field, get_tensor_like
from holdfast.types import Bool, Float, Tensor


class RewardNormalizer:
    """Divides rewards by the running standard deviation of discounted returns, as Gymnasium and SB3 do.

    The return of an agent is the discounted sum of its rewards up to now, from 0 at each episode start. It is carried
    over rollouts. The statistics get each rollout before it is used.
    """

    def __init__(self) -> None:
        self._stats, self._return = RunningStats(), torch.zeros(0)

    @torch.no_grad()
    def normalize(self, segments: Segments, gamma: float) -> Segments:
        """Add a complete rollout to the statistics, and return it with normalized rewards."""
        steps = segments.steps.unflatten(0, segments.agent_shape).flatten(1, 2)
        tail = segments.tail.unflatten(0, segments.agent_shape)[:, -1]
        ended = shift_left(steps["dones"] | steps["truncateds"], tail["dones"] | tail["truncateds"])
        rewards, valid = shift_left(steps["rewards"], tail["rewards"]), steps["valid"]
        # What a checkpoint holds is on the CPU.
        self._stats.to(rewards.device)
        self._return = self._return.to(rewards.device) if len(self._return) else torch.zeros_like(rewards[:, 0])
        if self._return.shape != rewards[:, 0].shape:
            raise ContractError(
                f"saved returns are {list(self._return.shape)}, must be [{len(rewards)}], one an agent."
            )
        returns = discounted_returns(rewards, valid, ended, self._return, gamma)
        self._return.copy_(torch.where(ended[:, -1], 0.0, returns[:, -1]))
        self._stats.update(returns, valid)
        std = self._stats.std.to(rewards.dtype)
        return segments.map_rewards(lambda reward: (reward / std).clamp(-CLIP, CLIP))

    def state(self) -> dict[str, Any]:
        """Return the statistics, and the return of each agent."""
        return {**self._stats.state_dict(), "return": self._return}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        stats = {name: get_tensor_like(saved, name, like) for name, like in self._stats.state_dict().items()}
        returns = get_field(saved, "return", Tensor).clone()
        if not returns.is_floating_point() or not bool(returns.isfinite().all()):
            raise ContractError("saved returns must be finite numbers")
        self._return = returns
        self._stats.load_state_dict(stats)

    def reset_agents(self, mask: Bool[Tensor, " A"]) -> None:
        """Clear the returns of agents that start a new episode."""
        if len(self._return):
            self._return = torch.where(mask.to(self._return.device), 0.0, self._return)


def discounted_returns(
    rewards: Float[Tensor, "A L"], valid: Tensor, ended: Tensor, before: Float[Tensor, " A"], gamma: float
) -> Float[Tensor, "A L"]:
    """Solve G[t] = r[t] + gamma n[t-1] G[t-1], skipping invalid steps.

    n is 0 where an episode ended; G[-1] is `before`.
    """
    goes_on = torch.nn.functional.pad(~ended[:, :-1], (1, 0), value=True)
    keep = torch.where(valid, gamma, 1.0).to(rewards.dtype) * goes_on
    add = torch.where(valid, rewards, 0.0)
    return reverse_scan(add.flip(1), keep.flip(1), before).flip(1)
