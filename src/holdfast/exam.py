"""Evaluations of a run, on the way and in the end: in worlds it never saw, with its memory and without."""

from collections.abc import Mapping

import torch

from holdfast.check.chance import shared_chance
from holdfast.config import Config
from holdfast.experience import MemoryMode, evaluate
from holdfast.knobs import WorldKnobs
from holdfast.policies import LSTMWrapper
from holdfast.unseen import (
    FINAL,
    ON_THE_WAY,
    good_number,
    require_bindable,
    spec_of,
    unseen_seed,
    unseen_world,
)
from holdfast.which_world import MixtureKnobs

EVALUATIONS: dict[str, MemoryMode] = {
    "eval/return_mean": "intact",
    "eval/return_mean_memory_cleared": "cleared",
}


def final_evaluation(
    config: Config, policy: LSTMWrapper, device: torch.device, number: int = FINAL
) -> dict[str, int | float]:
    """Play greedily on episodes the training never saw, with the memory intact and with it cleared.

    The worlds of a mixture are played one by one too, and so are `trainer.eval_worlds`.
    """
    episodes, scores = config.trainer.eval_episodes, dict[str, int | float]()
    seed = unseen_seed(config, number)
    for label, knobs in _worlds_to_play(config).items():
        agents = good_number(spec_of(knobs, device), episodes)
        with unseen_world(knobs, device, agents, seed) as unseen:
            for name, memory in EVALUATIONS.items():
                found = evaluate(policy, unseen, episodes=episodes, memory=memory)
                scores[f"{name}@{label}" if label else name] = found.return_mean
    return scores


def evaluation_on_the_way(
    config: Config, policy: LSTMWrapper, device: torch.device
) -> dict[str, int | float]:
    """Play as in the final evaluation, but other episodes, and touch nothing of the training's.

    Worlds, memories and the policy that plays are its own; generators that the program shares are put back.
    """
    with shared_chance(unseen_seed(config, ON_THE_WAY)):
        return final_evaluation(config, policy, device, ON_THE_WAY)


def score_of(config: Config, metrics: Mapping[str, int | float]) -> tuple[bool, float | None]:
    """Say whether an evaluation judged these weights, and how good they are; without any, training does."""
    by = "eval/return_mean" if config.trainer.eval_interval else "charts/episodic_return"
    score = metrics.get(by)
    return "eval/return_mean" in metrics, None if score is None else float(score)


def _worlds_to_play(config: Config) -> dict[str, WorldKnobs]:
    inside = config.world.parts if isinstance(config.world, MixtureKnobs) else ()
    return {"": config.world} | {part.label: part.world for part in (*inside, *config.trainer.eval_worlds)}


def require_playable(config: Config, policy: LSTMWrapper, device: torch.device) -> None:
    """Refuse worlds that the policy cannot be evaluated in before anybody trains for hours."""
    for label, knobs in _worlds_to_play(config).items():
        if label:
            require_bindable(policy, spec_of(knobs, device), f"trainer.eval_worlds: {label}")
