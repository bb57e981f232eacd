"""Evaluation: how well a policy does on episodes of its own, and what its memory is worth."""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch

from holdfast.experience.collect import as_batch
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Tensor
from holdfast.worlds import World

MemoryMode = Literal["intact", "cleared"]


@dataclass(frozen=True)
class Evaluation:
    """The returns of finished episodes."""

    returns: Float[Tensor, " episodes"]
    memory: MemoryMode

    @property
    def return_mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())


@torch.no_grad()
def evaluate(
    policy: LSTMWrapper, world: World, *, episodes: int, memory: MemoryMode = "intact"
) -> Evaluation:
    """Play greedily until every agent finished its share of the episodes.

    Every agent counts the same number of episodes, so short ones do not crowd out long ones. The
    policy is copied; `cleared` empties its memory before every step.
    """
    share = math.ceil(episodes / world.agents)
    step = world.reset()
    # Moving a copy to where it is lays its weights end to end again, as cuDNN wants them.
    player = copy.deepcopy(policy).eval().to(step.reward.device)
    player.store.open({0: world.agents})
    total = torch.zeros_like(step.reward)
    finished = torch.zeros_like(step.reward, dtype=torch.long)
    returns = step.reward.new_zeros(world.agents, share + 1)
    idle = torch.zeros_like(step.reward)
    while int(finished.min()) < share:
        td = as_batch(step, 0, idle)
        if memory == "cleared":
            td["first"] = torch.ones_like(step.first)
        actions = player(td)["full_log_probs"].argmax(-1)
        step = world.step(actions)
        total += step.reward
        ended = step.terminated | step.truncated
        slot = finished.clamp(max=share)[:, None]
        returns.scatter_(1, slot, torch.where(ended, total, returns.gather(1, slot)[:, 0])[:, None])
        finished += ended
        total = torch.where(ended, 0.0, total)
    return Evaluation(returns[:, :share].flatten()[:episodes], memory)
