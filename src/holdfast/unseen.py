"""Episodes that a training never saw: in which world, with how many agents, and from which seeds."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch

from holdfast.build import build_from
from holdfast.config import Config
from holdfast.errors import ConfigError, ContractError
from holdfast.experience import PATIENCE, Contest, Evaluation, MemoryMode, Score, compete, evaluate, score
from holdfast.knobs import WorldKnobs
from holdfast.policies import LSTMWrapper
from holdfast.which_world import EnvpoolKnobs
from holdfast.worlds import World, WorldSpec, closing_world, draws

AGENTS = 250
"""How many play at once if nobody says otherwise."""
FINAL, ON_THE_WAY = 0, -1
"""Which episodes: whoever is chosen by how it did on the way is judged by others in the end."""


@dataclass(frozen=True)
class Asked:
    """How to play."""

    episodes: int = 2000
    """In all, over all seeds."""
    seeds: int = 5
    agents: int | None = None
    """None: as many as are good."""
    greedy: bool = True
    patience: int = PATIENCE

    def share(self, number: int) -> int:
        """Say how many episodes are due to one of the seeds."""
        return self.episodes * (number + 1) // self.seeds - self.episodes * number // self.seeds


@dataclass(frozen=True)
class Result:
    """What was played in one mode of memory, over all seeds."""

    memory: MemoryMode
    returns: Score
    length_mean: float
    episodes: int
    theirs: "Result | None" = None
    """What another policy got that was played against."""
    lead: Score | None = None
    """By how much this one did better than that."""


def play_unseen(
    config: Config,
    policy: LSTMWrapper,
    device: torch.device,
    asked: Asked,
    modes: Sequence[MemoryMode] = ("intact",),
    *,
    against: LSTMWrapper | None = None,
    saw: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Play episodes that the training never saw, from several seeds, perhaps against another policy.

    Modes are those of the policy's own memory; the other's is intact. `saw` is told after each part.
    """
    results = list[list[Evaluation | Contest]]([] for _ in modes)
    for world, episodes, seed in _worlds(config, [policy, against], device, asked):
        how = {"greedy": asked.greedy, "seed": seed, "patience": asked.patience}
        whole = math.ceil(episodes / world.spec.crowd) * world.spec.crowd
        for memory, parts in zip(modes, results, strict=True):
            if against is None:
                parts.append(evaluate(policy, world, episodes=whole, memory=memory, **how))
            else:
                parts.append(compete(policy, against, world, episodes=episodes, memory=memory, **how))
            saw()
    return [_result(parts) for parts in results]


def _result(parts: Sequence[Evaluation | Contest]) -> Result:
    alone = [part for part in parts if isinstance(part, Evaluation)]
    if alone:
        return _summed(alone)
    contests = [part for part in parts if isinstance(part, Contest)]
    theirs = _summed([side for part in contests for side in part.theirs])
    lead = score([lead for part in contests for lead in part.leads])
    return replace(_summed([side for part in contests for side in part.mine]), theirs=theirs, lead=lead)


def _summed(parts: list[Evaluation]) -> Result:
    lengths = torch.cat([part.lengths for part in parts]).double()
    scored = score([part.places for part in parts])
    return Result(parts[0].memory, scored, float(lengths.mean()), len(lengths))


def _worlds(
    config: Config, policies: Sequence[LSTMWrapper | None], device: torch.device, asked: Asked
) -> Iterator[tuple[World, int, int]]:
    """Build a world for each seed, with the number of episodes due to it."""
    spec, name = spec_of(config.world, device), config.world.name
    there = [policy for policy in policies if policy is not None]
    for who, policy in zip((f"The policy in {name}", f"The other policy in {name}"), there, strict=False):
        require_bindable(policy, spec, who)
    for number in range(asked.seeds):
        episodes, seed = asked.share(number), unseen_seed(config, number)
        # With two policies a world is lived twice: sides are swapped.
        agents = asked.agents or good_number(spec, math.ceil(episodes / len(there)))
        with unseen_world(config.world, device, agents, seed) as world:
            yield world, episodes, seed


def unseen_seed(config: Config, number: int) -> int:
    """Derive the seed of a world that the training never saw."""
    return draws.seed_of(config.seed, draws.STREAM_UNSEEN, number)


def unseen_world(
    knobs: WorldKnobs, device: torch.device, agents: int, seed: int
) -> AbstractContextManager[World]:
    """Build a world in which all are answered at once, and close it in the end."""
    return closing_world(build_from(at_once(knobs), device, agents=agents, seed=seed))


def spec_of(knobs: WorldKnobs, device: torch.device) -> WorldSpec:
    """Look at a world's spec; with as many agents as in the run, since some worlds take no fewer."""
    with unseen_world(knobs, device, knobs.agents, 0) as world:
        return world.spec


def good_number(spec: WorldSpec, episodes: int) -> int:
    """Say how many agents play so many episodes: equally many each, in whole crowds and in all parts."""
    rounds = math.ceil(episodes / AGENTS)
    fewest = spec.crowd * max(1, len(spec.parts))
    return max(fewest, math.ceil(episodes / rounds / spec.crowd) * spec.crowd)


def at_once(knobs: WorldKnobs) -> WorldKnobs:
    """Answer all agents at once: what is lived is the same, and evaluations repeat."""
    if isinstance(knobs, EnvpoolKnobs) and knobs.vector == "async":
        return knobs.model_copy(update={"vector": "sync", "batch": 0})
    return knobs


def require_bindable(policy: LSTMWrapper, spec: WorldSpec, who: str) -> None:
    """Refuse a world that a policy cannot be bound to; the policy is left as it is."""
    try:
        copy.deepcopy(policy).bind(spec, learn=False)
    except ContractError as error:
        raise ConfigError(f"{who} cannot be played: {error}") from error
