"""The results of a sweep: one for each trial, the best one, and the Pareto front of return and cost."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.config.recipe_file import write_recipe_file
from holdfast.config.run import override
from holdfast.errors import ContractError
from holdfast.recipes import find_recipe
from holdfast.report.text import short_number
from holdfast.sweep.settings import SweepSettings

if TYPE_CHECKING:
    from optuna.trial import FrozenTrial

BEST = "best.yaml"
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running", "WAITING": "waiting"}
UNANSWERED = "its process or machine stopped answering"


@dataclass(frozen=True)
class TrialResult:
    """A trial: its newest attempt."""

    index: int
    state: str
    """finished, pruned, failed, running or waiting."""
    values: dict[str, Any]
    """Of the keys that vary."""
    score: float | None
    """Interquartile mean over seeds; None: not finished."""
    cost: float | None
    """CPU- or GPU-seconds of training, all seeds."""
    progress: float
    """Fraction of its steps, where it is running."""
    runs: dict[str, Any]
    """Return and seed of each finished run, by name."""
    attempts: int
    error: str
    """Why it failed, or why it was tried again."""

    def describe(self) -> str:
        """Return keys and values on one line; keys without their branch."""
        return " ".join(f"{key.rpartition('.')[2]}={shown(value)}" for key, value in self.values.items())


def shown(value: object) -> str:
    """Format the value of a key."""
    return short_number(value, 3) if isinstance(value, float) else str(value)


def results_of(attempts: Sequence["FrozenTrial"], points: int) -> list[TrialResult]:
    """Return one result for each trial, in order; `points` are those of its learning curves together."""
    newest = dict[int, TrialResult]()
    for trial in attempts:
        attributes = trial.user_attrs
        index, state = attributes["index"], STATES[trial.state.name]
        earlier = newest.get(index)
        error = attributes.get("error", UNANSWERED) if state == "failed" else ""
        newest[index] = TrialResult(
            index,
            state,
            dict(trial.params),
            attributes.get("score") if state == "finished" else None,
            attributes.get("cost"),
            min(1.0, (trial.last_step or 0) / points),
            dict(attributes.get("runs", {})),
            attributes.get("attempt", 1),
            error or (earlier.error if earlier else ""),
        )
    return [newest[index] for index in sorted(newest)]


def best_of(results: Sequence[TrialResult]) -> TrialResult | None:
    """Return the trial with the highest score; of equal ones the cheaper."""
    scored = [result for result in results if result.score is not None]
    return max(scored, key=lambda result: (result.score, -(result.cost or 0.0)), default=None)


def pareto_front(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials that no other one beats in return without costing more, the cheapest first."""
    front = list[TrialResult]()
    scored = [result for result in results if result.score is not None and result.cost is not None]
    for result in sorted(scored, key=lambda result: (result.cost, -(result.score or 0.0))):
        if not front or (result.score or 0.0) > (front[-1].score or 0.0):
            front.append(result)
    return front


def write_best(folder: Path, settings: SweepSettings, result: TrialResult) -> Path:
    """Write a trial as a recipe file, and check that it is the config that was trained."""
    file = folder / BEST
    runs = f"interquartile mean of {len(result.runs)} seeds" if len(result.runs) > 1 else "one seed"
    comment = (
        f"Trial {result.index} of {folder}: return {shown(result.score)} ({runs}).\n"
        f"holdfast train {file} seed={settings.config.seed}"
    )
    write_recipe_file(file, settings.recipe, {**settings.keys, **result.values}, comment)
    if find_recipe(str(file)) != override(settings.config, result.values):
        raise ContractError(f"{file} does not hold the config of trial {result.index}; take that of its run's folder.")
    return file
