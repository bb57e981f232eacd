"""The results of several seeds: seeds.json, and the table with interquartile mean and 95 % interval."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Column, Table
from rich.text import Text

from holdfast.errors import ConfigError, one_line, writing
from holdfast.evaluation.score import score
from holdfast.report import SEEDS
from holdfast.report.metrics import read_lines

CPU, GPU = "cpu_seconds", "gpu_seconds"
Results = dict[int, dict[str, Any]]
"""What is known of each seed that has ended, by seed."""


@dataclass(frozen=True)
class SeedsPlan:
    """What is trained."""

    arguments: list[str]
    """Recipe and keys as typed, without seeds, run and runs_dir."""
    seeds: list[int]
    unit: str
    """Of the cost."""


def read_plan(folder: Path) -> tuple[SeedsPlan, Results]:
    """Read seeds.json."""
    try:
        values = json.loads((folder / SEEDS).read_text(encoding="utf-8"))
        results = {int(seed): dict(result) for seed, result in values["results"].items()}
        _require_plan(values, results)
        return SeedsPlan(values["arguments"], values["seeds"], values["unit"]), results
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{folder / SEEDS} is damaged: {one_line(error)}; resume each seed on its own.") from None


def _require_plan(values: dict[str, Any], results: Results) -> None:
    """Raise a ValueError for values that no run of several seeds writes."""
    arguments, seeds, unit = list(values["arguments"]), list(values["seeds"]), values["unit"]
    if arguments != values["arguments"] or not all(isinstance(argument, str) for argument in arguments):
        raise ValueError("an argument is not text")
    if not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise ValueError("seeds are not different integers from 0 on")
    if unit not in (CPU, GPU):
        raise ValueError(f"the unit is {str(unit)[:100]!r}")
    for seed, result in results.items():
        names = ("return", "return_memory_cleared", "training_return", "steps", unit)
        numbers = [result[name] for name in names if result[name] is not None]
        is_number = all(isinstance(number, int | float) and math.isfinite(number) for number in numbers)
        if not is_number or not isinstance(result["finished"], bool) or not isinstance(result["error"], str):
            raise ValueError(f"the result of seed {seed} is not one")


def write_results(folder: Path, plan: SeedsPlan, results: Results) -> None:
    """Write seeds.json whole or not at all."""
    by_seed = {str(seed): results[seed] for seed in plan.seeds if seed in results}
    head = {"arguments": plan.arguments, "seeds": plan.seeds, "unit": plan.unit}
    values = {**head, **scores_of(results), "results": by_seed}
    part = folder / f".{SEEDS}.part"
    with writing(folder / SEEDS):
        part.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        part.replace(folder / SEEDS)


def run_result(folder: Path, unit: str, cost: float, error: str, *, finished: bool) -> dict[str, Any]:
    """Return what is known of a run that has ended."""
    metrics = dict[str, Any]()
    for line in read_lines(folder / "metrics.jsonl"):
        metrics |= line
    return {
        "run": str(folder),
        "finished": finished,
        "return": metrics.get("eval/return_mean"),
        "return_memory_cleared": metrics.get("eval/return_mean_memory_cleared"),
        "training_return": metrics.get("charts/episodic_return"),
        "steps": metrics.get("global_step"),
        unit: round(cost, 2),
        "error": error,
    }


def scores_of(results: Results) -> dict[str, Any]:
    """Return interquartile mean and mean over the finished seeds; with two or more, their 95 % intervals."""
    finished = [result["return"] for result in results.values() if result["finished"]]
    returns = [value for value in finished if value is not None]
    if not returns:
        return {}
    if len(returns) == 1:
        return {"return_iqm": returns[0], "return_mean": returns[0]}
    # One row for each seed: seeds are resampled, not episodes.
    scored = score([torch.tensor(returns, dtype=torch.float64)[:, None]])
    return {
        "return_iqm": scored.iqm,
        "return_iqm_ci95": list(scored.iqm_ci95),
        "return_mean": scored.mean,
        "return_mean_ci95": list(scored.mean_ci95),
    }


def results_table(plan: SeedsPlan, results: Results) -> Table:
    """Return the table of all seeds."""
    names = ("seed", "return", "memory cleared", "steps", "GPU-s" if plan.unit == GPU else "CPU-s")
    table = Table(
        *(Column(name, justify="right") for name in names),
        Column("", overflow="fold"),
        box=None,
        padding=(0, 3, 0, 0),
        pad_edge=False,
    )
    for seed in plan.seeds:
        result = results.get(seed, {"finished": False, "error": "not trained"})
        numbers = (_number(result.get("return")), _number(result.get("return_memory_cleared")))
        steps = "" if result.get("steps") is None else f"{result['steps']:,}"
        state = "" if result["finished"] else result["error"]
        table.add_row(str(seed), *numbers, steps, f"{result.get(plan.unit, 0.0):.1f}", Text(state))
    return table


def scores_line(results: Results) -> str:
    """Describe the interquartile mean over seeds."""
    scores, count = scores_of(results), sum(result["finished"] for result in results.values())
    if not scores:
        return "no seed has a return: no episode ended, or no seed finished."
    interval = scores.get("return_iqm_ci95")
    between = "" if interval is None else f", 95 % interval {interval[0]:.3f} to {interval[1]:.3f}"
    return f"interquartile mean of {count} seed{'s' * (count != 1)} {scores['return_iqm']:.3f}{between}"


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.3f}"
