"""Periodic and final evaluation of a run, on held-out seeds: memory intact and cleared; at the end sampled too."""

from collections.abc import Mapping

import torch

from holdfast.config.run import Config
from holdfast.config.world_names import MixtureConfig
from holdfast.config.worlds import WorldConfig
from holdfast.errors import ConfigError
from holdfast.evaluation.evaluate import Log, MemoryMode, evaluate
from holdfast.evaluation.held_out import (
    AGENTS,
    FINAL,
    PERIODIC,
    held_out_seed,
    held_out_world,
    num_agents_for,
    require_bindable,
    world_spec,
)
from holdfast.policies import LSTMWrapper
from holdfast.rng import isolated_rng
from holdfast.worlds.env_source import source_of

EVALUATIONS: dict[str, MemoryMode] = {"eval/return_mean": "intact", "eval/return_mean_memory_cleared": "cleared"}
SAMPLED = "eval/sampled_return_mean"
SAMPLED_SHARE = 4
"""Sampled actions are evaluated in one of so many episodes: that costs little beside the greedy evaluation."""


def final_evaluation(
    config: Config, policy: LSTMWrapper, device: torch.device, number: int = FINAL, *, log: Log | None = None
) -> dict[str, int | float]:
    """Evaluate on held-out seeds: greedily, with memory intact and cleared, and at the end with sampled actions.

    Covers each world of a mixture and `trainer.eval_worlds` too. `log` gets progress and episodes that did not end.
    """
    episodes, max_steps = config.trainer.eval_episodes, config.trainer.eval_max_steps
    scores = dict[str, int | float]()
    seed = held_out_seed(config, number)
    for label, world_config in _eval_worlds(config).items():
        agents = num_agents_for(world_config, world_spec(world_config, device), episodes)
        with held_out_world(world_config, device, agents, seed) as world:
            for name, memory in EVALUATIONS.items():
                result = evaluate(policy, world, episodes=episodes, memory=memory, max_steps=max_steps, log=log)
                scores[f"{name}@{label}" if label else name] = result.return_mean
            if number == FINAL:
                fewer = sampled_episodes(episodes)
                result = evaluate(policy, world, episodes=fewer, greedy=False, seed=seed, max_steps=max_steps, log=log)
                scores[f"{SAMPLED}@{label}" if label else SAMPLED] = result.return_mean
    return scores


def sampled_episodes(episodes: int) -> int:
    """Number of episodes with sampled actions beside so many greedy ones: a quarter, and one of each agent."""
    return max(episodes // SAMPLED_SHARE, min(episodes, AGENTS))


def periodic_evaluation(
    config: Config, policy: LSTMWrapper, device: torch.device, *, log: Log | None = None
) -> dict[str, int | float]:
    """Evaluate as at the end, on other seeds, without effect on training.

    Worlds, states and the policy are copies; the global random generators are restored.
    """
    with isolated_rng(held_out_seed(config, PERIODIC)):
        return final_evaluation(config, policy, device, PERIODIC, log=log)


def _eval_worlds(config: Config) -> dict[str, WorldConfig]:
    parts = config.world.parts if isinstance(config.world, MixtureConfig) else ()
    return {"": config.world} | {part.label: part.world for part in (*parts, *config.trainer.eval_worlds)}


def check_eval_worlds(config: Config, policy: LSTMWrapper, device: torch.device) -> None:
    """Raise before training if the policy cannot be evaluated in a world."""
    source = source_of(config.world)
    if config.trainer.eval_interval and source is not None and source.is_object:
        raise ConfigError(
            f"trainer.eval_interval={config.trainer.eval_interval} needs another {source.name} beside the one that is "
            "trained in; pass a function that makes them, env=lambda: ..., or leave out trainer.eval_interval."
        )
    for label, world_config in _eval_worlds(config).items():
        if label:
            require_bindable(policy, world_spec(world_config, device), f"trainer.eval_worlds: {label}")


def score_of(config: Config, metrics: Mapping[str, int | float]) -> tuple[bool, float | None]:
    """Return whether the weights were evaluated, and their score: of the evaluation, or else of training."""
    score = metrics.get("eval/return_mean" if config.trainer.eval_interval else "charts/episodic_return")
    return "eval/return_mean" in metrics, None if score is None else float(score)
