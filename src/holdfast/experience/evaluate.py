"""Evaluation: how well a policy does on episodes of its own, and what its memory is worth."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from holdfast.errors import ContractError
from holdfast.experience.minds import MemoryMode, Mind
from holdfast.experience.tally import Tally, picked
from holdfast.policies import LSTMWrapper
from holdfast.shapes import Float, Int, Tensor
from holdfast.worlds import Step, World
from holdfast.worlds.watched import settle, watched

PATIENCE = 100_000
"""Steps within which an episode must end."""


@dataclass(frozen=True)
class Evaluation:
    """The returns and lengths of finished episodes."""

    returns: Float[Tensor, " episodes"]
    lengths: Int[Tensor, " episodes"]
    memory: MemoryMode
    together: int = 1
    """How many of them, one after the other, were lived in one place at one time and may have felt it."""

    @property
    def return_mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def length_mean(self) -> float:
        """The mean length."""
        return float(self.lengths.double().mean())

    @property
    def places(self) -> Float[Tensor, "places together"]:
        """The returns, those that were lived together side by side."""
        return self.returns.unflatten(0, (-1, self.together))


@torch.no_grad()
def evaluate(
    policy: LSTMWrapper,
    world: World,
    *,
    episodes: int,
    memory: MemoryMode = "intact",
    greedy: bool = True,
    seed: int = 0,
    patience: int = PATIENCE,
) -> Evaluation:
    """Play until every agent finished its share of the episodes; the policy is copied.

    Agents count equally many episodes (to within one), so short ones do not crowd out long ones. `memory`
    says what is done to it: see `Mind`. Without `greedy`, actions are drawn; the `seed` decides all draws
    but the world's. An agent that finishes no episode within `patience` steps is an error.
    """
    if episodes < 1:
        raise ContractError(f"episodes={episodes}: an evaluation needs one at least.")
    with own_randomness(seed):
        world = watched(world)
        step = world.reset()
        rows = torch.arange(world.agents, device=step.reward.device)
        mind = Mind(policy, world.spec, rows, memory=memory, greedy=greedy, seed=seed)
        share = math.ceil(episodes / world.agents)
        tally = play(world, step, mind.act, Tally(world.agents, share, rows.device, patience))
    together = 1 if episodes % world.spec.crowd else world.spec.crowd
    returns, lengths = (picked(table, episodes, together) for table in (tally.returns, tally.lengths))
    return Evaluation(returns, lengths, memory, together)


def play(world: World, step: Step, act: Callable[[Step], Tensor], tally: Tally) -> Tally:
    """Go on from a step until a tally is whole."""
    while not tally.whole:
        acted, step = step.valid, world.step(act(step))
        tally.saw(acted, step)
    settle(world)
    return tally


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Let policies and worlds that draw from torch's global generators repeat; leave those as they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
