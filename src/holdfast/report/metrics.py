"""The metrics dictionary: every number a run reports, its unit and its meaning."""

import json
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import ContractError


@dataclass(frozen=True)
class Metric:
    """What a number means."""

    unit: str
    meaning: str
    healthy: str = ""


# `NAME@WORLD` is the same number of one world of several.
METRICS: dict[str, Metric] = {
    "global_step": Metric("steps", "agent steps lived so far; rows in which nobody acts are not counted"),
    "iteration": Metric("count", "rollouts and updates so far"),
    "seconds": Metric("s", "wall-clock time since the run began"),
    "charts/SPS": Metric("steps/s", "agent steps a second over the last iteration"),
    "charts/episodes": Metric("count", "episodes that ended in the last rollout"),
    "charts/episodic_return": Metric("reward", "mean return of the episodes that ended"),
    "charts/episodic_length": Metric("steps", "mean length of the episodes that ended"),
    "charts/learning_rate": Metric("", "the optimiser's step size"),
    "charts/ent_coef": Metric("", "weight of the entropy bonus"),
    "losses/policy_loss": Metric("", "clipped policy loss, mean over minibatches"),
    "losses/value_loss": Metric("", "value loss, mean over minibatches"),
    "losses/entropy": Metric("nats", "mean entropy of the action distribution"),
    "losses/approx_kl": Metric("nats", "how far the policy moved within the update", "below 0.05"),
    "losses/clipfrac": Metric("share", "steps whose ratio left the clip range", "below 0.3"),
    "losses/grad_norm": Metric("", "length of the gradient before clipping"),
    "losses/explained_variance": Metric("", "1: values explain the returns; 0: not at all"),
    "memory/replay_error": Metric(
        "", "largest |ratio - 1| of the first minibatch, before any weight changed", "below 1e-5"
    ),
    "memory/replay_value_error": Metric(
        "", "largest relative change of a value in that replay", "below 1e-5"
    ),
    "memory/check_replay": Metric(
        "", "largest change of a value or probability when stored segments are replayed", "below 1e-5"
    ),
    "memory/check_clear": Metric(
        "", "how much is felt after a start when all that was stored before it is exchanged", "exactly 0"
    ),
    "eval/return_mean": Metric("reward", "mean greedy return of the final evaluation"),
    "eval/return_mean_memory_cleared": Metric("reward", "the same with memory emptied before every step"),
}


class MetricsFile:
    """`metrics.jsonl`: the truth of a run; one line an update, written through at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def write(self, metrics: dict[str, int | float]) -> None:
        """Append one line; a number nobody described is refused."""
        unknown = {name for name in metrics if name.partition("@")[0] not in METRICS}
        if unknown:
            raise ContractError(f"{sorted(unknown)} are not in the metrics dictionary; describe them there.")
        self._file.write(json.dumps(metrics) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
