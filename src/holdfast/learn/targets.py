"""What the update learns from: advantages and returns of every stored step."""

from dataclasses import dataclass
from typing import Literal

import torch

from holdfast.experience import Segments
from holdfast.experience.worth import shift_in, worth_at_edges
from holdfast.learn import losses
from holdfast.learn.advantage import gae, vtrace
from holdfast.shapes import Float, Int, Tensor
from holdfast.trainer_knobs import PPO


@dataclass(frozen=True)
class Targets:
    """How much better each action was than expected, and what each step returned."""

    advantages: Float[Tensor, "B T"]
    returns: Float[Tensor, "B T"]

    def rows(self, index: Int[Tensor, " rows"]) -> "Targets":
        """Take some rows."""
        return Targets(self.advantages[index], self.returns[index])


@torch.no_grad()
def targets_of(segments: Segments, ppo: PPO, values: Literal["values", "values_now"] = "values") -> Targets:
    """Compute advantages and returns from what is stored: rewards, flags, values, and for V-trace the ratios.

    Values are those that were lived, or what the update last thought of them.
    """
    steps, tail = segments.steps, segments.tail
    told = {
        "values": steps[values],
        "valid": steps["valid"],
        "next_rewards": shift_in(steps["rewards"], tail["rewards"]),
        "next_terminated": shift_in(steps["dones"], tail["dones"]),
        "next_truncated": shift_in(steps["truncateds"], tail["truncateds"]),
        "next_last_values": shift_in(steps["last_values"], tail["last_values"]),
        "end_values": tail["values"],
    }
    if ppo.advantage == "gae":
        advantages = gae(**told, gamma=ppo.gamma, lam=ppo.gae_lambda)
    else:
        advantages = vtrace(
            **told,
            ratio=steps["ratio"],
            gamma=ppo.gamma,
            lam=ppo.gae_lambda,
            rho_clip=ppo.rho_clip,
            c_clip=ppo.c_clip,
        )
    return Targets(advantages, advantages + steps[values])


@torch.no_grad()
def renew_tails(segments: Segments) -> None:
    """Let each row's tail tell what the next row is worth by now; that of the last one nobody asked again."""
    horizon = segments.steps.shape[1]
    shape = segments.by_agent
    steps = segments.steps.unflatten(0, shape).flatten(1, 2)
    after = segments.tail.unflatten(0, shape)[:, -1]
    values = worth_at_edges(steps["values_now"], steps, after, horizon)
    segments.tail["values"].copy_(values.flatten(0, 1))


def normalised(
    targets: Targets, segments: Segments, ppo: PPO, weights: Float[Tensor, " B"] | None
) -> Targets:
    """Make the advantages of a minibatch comparable, and weigh rows by how often they are drawn."""
    advantages = targets.advantages
    if ppo.norm_adv:
        advantages = losses.normalize(advantages, segments.steps["valid"])
    if weights is not None:
        advantages = advantages * weights[:, None]
    return Targets(advantages, targets.returns)
