"""Evaluation: how well a policy does on episodes of its own, and what its memory is worth."""

import copy
import math
from dataclasses import dataclass
from typing import Literal

import torch

from holdfast.errors import ContractError
from holdfast.experience.collect import as_batch
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Int, Tensor
from holdfast.worlds import World
from holdfast.worlds.watched import settle, watched

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
    policy: LSTMWrapper,
    world: World,
    *,
    episodes: int,
    memory: MemoryMode = "intact",
    patience: int = 100_000,
) -> Evaluation:
    """Play greedily until every agent finished its share of the episodes.

    Agents count equally many episodes (to within one), so short ones do not crowd out long ones.
    The policy is copied; `cleared` empties its memory before every step. An agent that finishes no
    episode within `patience` steps is an error.
    """
    share = math.ceil(episodes / world.agents)
    world = watched(world)
    step = world.reset()
    player = _player(policy, world, step.reward.device)
    total, told = torch.zeros_like(step.reward, dtype=torch.float64), player.actions
    idle = told.idle(world.agents, step.reward.device)
    finished = torch.zeros_like(step.reward, dtype=torch.long)
    since = torch.zeros_like(finished)
    returns = total.new_zeros(world.agents, share + 1)
    while int(finished.min()) < share:
        if memory == "cleared":
            player.reset_memory()
        actions = told.greedy(player(as_batch(step, 0, idle))[told.key])
        acted, step = step.valid, world.step(actions)
        total += torch.where(acted, step.reward, 0.0)
        ended = step.terminated | step.truncated
        slot = finished.clamp(max=share)[:, None]
        returns.scatter_(1, slot, torch.where(ended, total, returns.gather(1, slot)[:, 0])[:, None])
        finished += ended
        total = torch.where(ended, 0.0, total)
        since = torch.where(ended, 0, since + 1)
        _require_patience(since, patience)
    settle(world)
    return Evaluation(_counted(returns[:, :share], episodes), memory)


def _counted(returns: Float[Tensor, "A share"], episodes: int) -> Float[Tensor, " episodes"]:
    """Take so many returns, round by round.

    Whose last episode counts is spread over all agents, since those who live in one world are neighbours.
    """
    agents, share = returns.shape
    left = episodes - (share - 1) * agents
    some = torch.arange(left, device=returns.device) * agents // left
    return torch.cat([returns[:, :-1].T.flatten(), returns[some, -1]]).float()


def _player(policy: LSTMWrapper, world: World, device: torch.device) -> LSTMWrapper:
    """Copy a policy to play in a world."""
    # Moving a copy to where it is lays its weights end to end again, as cuDNN wants them.
    player = copy.deepcopy(policy).eval().to(device)
    if player.binding.spec is None or player.binding.spec.words != world.spec.words:
        player.bind(world.spec, learn=False)
    player.store.open({0: world.agents})
    return player


def _require_patience(since: Int[Tensor, " A"], patience: int) -> None:
    if int(since.max()) > patience:
        raise ContractError(
            f"Agent {int(since.argmax())} finished no episode within {patience} steps; evaluation needs "
            "episodes that end."
        )
