"""The final evaluation: how well a policy does in worlds it never saw, with its memory and without."""

import copy
import math

import torch

from holdfast.build import build_from
from holdfast.config import Config
from holdfast.errors import ConfigError, ContractError
from holdfast.experience import MemoryMode, evaluate
from holdfast.knobs import WorldKnobs
from holdfast.policies import LSTMWrapper
from holdfast.which_world import GymKnobs, MixtureKnobs
from holdfast.worlds import closing_world, draws

EVALUATION_AGENTS = 250
EVALUATIONS: dict[str, MemoryMode] = {
    "eval/return_mean": "intact",
    "eval/return_mean_memory_cleared": "cleared",
}


def final_evaluation(config: Config, policy: LSTMWrapper, device: torch.device) -> dict[str, int | float]:
    """Play greedily on episodes the training never saw, with the memory intact and with it cleared.

    The worlds of a mixture are played one by one too, and so are `trainer.eval_worlds`.
    """
    episodes, scores = config.trainer.eval_episodes, dict[str, int | float]()
    seed = draws.seed_of(config.seed, draws.STREAM_UNSEEN)
    for label, knobs in _worlds_to_play(config).items():
        crowd, fewest = _crowd(knobs, device)
        agents = max(fewest, math.ceil(min(EVALUATION_AGENTS, episodes) / crowd) * crowd)
        with closing_world(build_from(knobs, device, agents=agents, seed=seed)) as unseen:
            for name, memory in EVALUATIONS.items():
                found = evaluate(policy, unseen, episodes=episodes, memory=memory)
                scores[f"{name}@{label}" if label else name] = found.return_mean
    return scores


def _worlds_to_play(config: Config) -> dict[str, WorldKnobs]:
    inside = config.world.parts if isinstance(config.world, MixtureKnobs) else ()
    worlds = {"": config.world} | {part.label: part.world for part in (*inside, *config.trainer.eval_worlds)}
    return {label: _in_this_process(knobs) for label, knobs in worlds.items()}


def _in_this_process(knobs: WorldKnobs) -> WorldKnobs:
    """Evaluate without processes: what is lived is the same, and there would be hundreds."""
    if isinstance(knobs, GymKnobs) and knobs.vector == "async":
        return knobs.model_copy(update={"vector": "sync"})
    return knobs


def _crowd(knobs: WorldKnobs, device: torch.device) -> tuple[int, int]:
    """Say in what multiples a world takes agents, and how few; one of yours says it in its spec."""
    with closing_world(build_from(knobs, device, agents=knobs.agents, seed=0)) as world:
        return world.spec.crowd, world.spec.crowd * max(1, len(world.spec.parts))


def require_playable(config: Config, policy: LSTMWrapper, device: torch.device) -> None:
    """Refuse worlds that the policy cannot be evaluated in before anybody trains for hours."""
    for label, knobs in _worlds_to_play(config).items():
        if label:
            with closing_world(build_from(knobs, device, agents=knobs.agents, seed=0)) as world:
                try:
                    copy.deepcopy(policy).bind(world.spec, learn=False)
                except ContractError as error:
                    raise ConfigError(f"trainer.eval_worlds: {label} cannot be played: {error}") from error


def evaluation_on_the_way(
    config: Config, policy: LSTMWrapper, device: torch.device
) -> dict[str, int | float]:
    """Stand in."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return final_evaluation(config, policy, device)
