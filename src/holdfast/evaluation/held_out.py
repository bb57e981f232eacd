"""Held-out evaluation: worlds with seeds that training never uses."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from holdfast import rng
from holdfast.config.run import Config
from holdfast.config.worlds import WorldConfig
from holdfast.errors import ConfigError, ContractError, one_line
from holdfast.evaluation.evaluate import MAX_STEPS, Evaluation, Log, Match, MemoryMode, compete, evaluate
from holdfast.evaluation.score import Score, score
from holdfast.policies import LSTMWrapper
from holdfast.worlds import World, WorldSpec, closing_world, make_world, world_options
from holdfast.worlds.env_source import source_of

AGENTS = 250
"""Default number of agents."""
FINAL, PERIODIC = 0, -1
"""Periodic and final evaluation use different seeds, so the best checkpoint is not scored on the episodes it
was selected on."""


@dataclass(frozen=True)
class EvalSettings:
    """Settings of an evaluation."""

    episodes: int = 2000
    """In total, over all seeds."""
    seeds: int = 5
    agents: int | None = None
    """None: chosen by `num_agents_for`."""
    greedy: bool = True
    max_steps: int = MAX_STEPS

    def episodes_of(self, number: int) -> int:
        """Number of episodes of one seed."""
        return self.episodes * (number + 1) // self.seeds - self.episodes * number // self.seeds


@dataclass(frozen=True)
class EvalResult:
    """Result of one memory mode, over all seeds."""

    memory: MemoryMode
    returns: Score
    length_mean: float
    episodes: int
    cut: int = 0
    """Number of episodes that did not end."""
    opponent: "EvalResult | None" = None
    """The opponent's result in a match."""
    margin: Score | None = None
    """Score of the difference to the opponent."""


def evaluate_held_out(
    config: Config,
    policy: LSTMWrapper,
    device: torch.device,
    settings: EvalSettings,
    modes: Sequence[MemoryMode] = ("intact",),
    *,
    opponent: LSTMWrapper | None = None,
    on_part: Callable[[], None] = lambda: None,
    log: Log | None = None,
) -> list[EvalResult]:
    """Evaluate a policy on held-out seeds, optionally in a match against an opponent.

    `modes` apply to the policy's memory; the opponent's stays intact. `on_part` is called after each mode of
    each seed, `log` with progress and with episodes that did not end.
    """
    results = list[list[Evaluation | Match]]([] for _ in modes)
    for world, episodes, seed in _worlds(config, [policy, opponent], device, settings):
        kwargs: dict[str, Any] = {"greedy": settings.greedy, "seed": seed, "max_steps": settings.max_steps, "log": log}
        rounded = math.ceil(episodes / world.spec.agents_per_env) * world.spec.agents_per_env
        for memory, parts in zip(modes, results, strict=True):
            if opponent is None:
                parts.append(evaluate(policy, world, episodes=rounded, memory=memory, **kwargs))
            else:
                parts.append(compete(policy, opponent, world, episodes=episodes, memory=memory, **kwargs))
            on_part()
    return [_result(parts) for parts in results]


def _result(parts: Sequence[Evaluation | Match]) -> EvalResult:
    matches = [part for part in parts if isinstance(part, Match)]
    if not matches:
        return _combine([part for part in parts if isinstance(part, Evaluation)])
    opponent = _combine([side for match in matches for side in match.opponent])
    margin = score([margin for match in matches for margin in match.margins])
    return replace(_combine([side for match in matches for side in match.ours]), opponent=opponent, margin=margin)


def _combine(parts: list[Evaluation]) -> EvalResult:
    lengths = torch.cat([part.lengths for part in parts]).double()
    returns = score([part.per_agent for part in parts])
    return EvalResult(parts[0].memory, returns, float(lengths.mean()), len(lengths), sum(part.cut for part in parts))


def _worlds(
    config: Config, policies: Sequence[LSTMWrapper | None], device: torch.device, settings: EvalSettings
) -> Iterator[tuple[World, int, int]]:
    """Build the world of each seed; yield it with its number of episodes and its seed."""
    spec, name = world_spec(config.world, device), config.world.name
    players = [policy for policy in policies if policy is not None]
    for role, policy in zip((f"The policy in {name}", f"The other policy in {name}"), players, strict=False):
        require_bindable(policy, spec, role)
    for number in range(settings.seeds):
        episodes, seed = settings.episodes_of(number), held_out_seed(config, number)
        # A match plays each world twice, with sides swapped.
        agents = settings.agents or num_agents_for(config.world, spec, math.ceil(episodes / len(players)))
        with held_out_world(config.world, device, agents, seed) as world:
            yield world, episodes, seed


def held_out_seed(config: Config, number: int) -> int:
    """Derive a held-out seed from the run's seed."""
    return rng.derive_seed(config.seed, rng.STREAM_HELD_OUT, number)


def held_out_world(config: WorldConfig, device: torch.device, agents: int, seed: int) -> AbstractContextManager[World]:
    """Build a synchronous world; the context closes it."""
    config = force_sync(config)
    world = make_world(config.name, agents=agents, seed=seed, device=device, **world_options(config))
    return closing_world(world, config)


def world_spec(config: WorldConfig, device: torch.device) -> WorldSpec:
    """Return a world's spec; built with the run's number of agents, because some worlds take no fewer."""
    with held_out_world(config, device, config.agents, 0) as world:
        return world.spec


def num_agents_for(config: WorldConfig, spec: WorldSpec, episodes: int) -> int:
    """Number of agents for so many episodes: equally many each, in full environments and in all parts."""
    source = source_of(config)
    if source is not None and source.agents is not None:
        return source.agents
    rounds = math.ceil(episodes / AGENTS)
    minimum = spec.agents_per_env * max(1, len(spec.parts))
    return max(minimum, math.ceil(episodes / rounds / spec.agents_per_env) * spec.agents_per_env)


def force_sync(config: WorldConfig) -> WorldConfig:
    """Force synchronous stepping, so that evaluations are reproducible."""
    return config.model_copy(update=dict(config.family.sync))


def require_bindable(policy: LSTMWrapper, spec: WorldSpec, role: str) -> None:
    """Raise if a policy cannot be bound to a world; the policy does not change."""
    try:
        copy.deepcopy(policy).bind(spec, learn=False)
    except ContractError as error:
        raise ConfigError(f"{role} cannot be played: {one_line(error)}") from error
