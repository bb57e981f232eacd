"""Every metric with its unit, meaning and healthy range; alarms; metrics.jsonl."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from holdfast.errors import ContractError, writing
from holdfast.monitor.replay_check import REPLAY_ALARM
from holdfast.report.text import short_number

Kind = Literal["run", "time", "machine"]
Metrics = Mapping[str, int | float]
GRADIENT_ALARM = 1e3
"""Largest healthy gradient norm before clipping; 0 is not healthy either."""


@dataclass(frozen=True)
class Metric:
    """Description of a metric."""

    unit: str
    meaning: str
    healthy: str = ""
    kind: Kind = "run"
    """What it depends on: `run`: config and seed, bit for bit; `time`: the clock; `machine`: the machine."""


def find_metric(name: str) -> Metric | None:
    """Return the description of a metric; `NAME@LABEL` is one of several, with the same description."""
    return METRICS.get("custom" if name.startswith(CUSTOM) else name.partition("@")[0])


METRICS: dict[str, Metric] = {
    "global_step": Metric("steps", "agent steps so far; invalid steps are not counted"),
    "iteration": Metric("count", "rollouts and updates so far"),
    "seconds": Metric("s", "wall-clock time since the start of the run", kind="time"),
    "custom": Metric("", "`custom/NAME`: a number that a callback logged"),
    "time/world": Metric("s", "world steps of the last iteration", kind="time"),
    "time/forward": Metric("s", "policy forward passes of the rollout", kind="time"),
    "time/copy": Metric("s", "copies into the rollout buffer", kind="time"),
    "time/rollout": Metric("s", "rollouts replayed as CUDA graphs: world, policy and copies together", kind="time"),
    "time/update": Metric("s", "the PPO update", kind="time"),
    "time/other": Metric("s", "the rest: checks, monitors, files, console", kind="time"),
    "charts/SPS": Metric("steps/s", "agent steps per second over the last iteration", kind="time"),
    "charts/episodes": Metric("count", "episodes that ended in the last rollout"),
    "charts/episodic_return": Metric("reward", "mean return of the episodes that ended"),
    "charts/episodic_length": Metric("steps", "mean length of the episodes that ended"),
    "charts/learning_rate": Metric("", "learning rate of the optimizer"),
    "charts/scheduled": Metric("", "`@KEY`: current value of a config key with a schedule"),
    "charts/epochs": Metric("count", "epochs of the last update; fewer than configured: stopped by target KL"),
    "charts/gradient_steps": Metric("count", "optimizer steps of the last update"),
    "charts/beta": Metric("", "importance-sampling exponent of prioritized sampling"),
    "losses/policy_loss": Metric("", "clipped policy loss, mean over minibatches"),
    "losses/value_loss": Metric("", "value loss, mean over minibatches"),
    "losses/entropy": Metric("nats", "mean entropy of the action distribution"),
    "losses/approx_kl": Metric("nats", "approximate KL of old and new policy in the update", "below 0.05"),
    "losses/clipfrac": Metric("fraction", "steps whose ratio was clipped", "below 0.3"),
    "losses/grad_norm": Metric("", "gradient norm before clipping", "above 0, below 1000"),
    "losses/explained_variance": Metric(
        "", "explained variance of the returns by the values; 1: perfect, 0: none", "towards 1"
    ),
    "losses/importance": Metric("", "mean ratio of new to old action probability", "near 1"),
    "losses/l2_init": Metric("", "squared L2 distance of all weights from their initial values"),
    "losses/l2_reg": Metric("", "squared L2 norm of all weights"),
    "losses/teacher_action": Metric("nats", "`@TEACHER`: cross entropy of the policy's actions under the teacher's"),
    "losses/teacher_value": Metric("", "`@TEACHER`: mean squared error against the teacher's values"),
    "memory/replay_error": Metric(
        "", "largest |ratio - 1| of the first minibatch, before any weight changed", "below 1e-5"
    ),
    "memory/replay_value_error": Metric("", "largest relative difference of a value in the same replay", "below 1e-5"),
    "memory/check_replay": Metric(
        "", "largest difference of a value or probability when stored segments are replayed", "below 1e-5"
    ),
    "memory/check_clear": Metric(
        "", "largest output change after an episode start when the steps before it are replaced", "exactly 0"
    ),
    "memory/drift": Metric(
        "",
        "relative distance of stored entry states from those the current weights compute for the same steps, "
        "before the refresh",
    ),
    "memory/stale_kl": Metric(
        "nats",
        "KL between the policy from fresh and from stored entry states, same weights: the policy change that "
        "stale states alone cause",
        "well below losses/approx_kl",
    ),
    "memory/resets": Metric("count", "hidden-state resets in the last rollout"),
    "memory/resets_due": Metric(
        "count", "episode starts in the last rollout, each of which must reset", "equal to memory/resets"
    ),
    "memory/state_norm": Metric("", "mean hidden-state norm"),
    "memory/state_norm_max": Metric("", "largest hidden-state norm"),
    "memory/saturation": Metric("fraction", "saturated units of the hidden state", "below 0.5"),
    "memory/age_mean": Metric("steps", "mean time since the last reset of an agent"),
    "memory/age_max": Metric("steps", "longest time since the last reset of an agent"),
    "memory/gradient_reach": Metric(
        "steps", "steps back within which 80 % of the gradient lies", "below trainer.bptt_horizon"
    ),
    "memory/buffer_bytes": Metric("bytes", "size of the rollout buffer"),
    "memory/state_bytes": Metric("bytes", "size of the hidden states of all agents"),
    "memory/graph_bytes": Metric("bytes", "tensors saved for the backward pass of a minibatch"),
    "gradients/norm": Metric("", "`@MODULE`: gradient norm of a module in the first minibatch, before clipping"),
    "gradients/within": Metric("fraction", "`@N`: part of the gradient that reaches at most N steps back"),
    "weights/norm": Metric("", "`@LAYER`: norm of the weights"),
    "weights/largest_sv": Metric("", "`@LAYER`: largest singular value"),
    "weights/mean_sv": Metric("", "`@LAYER`: mean singular value"),
    "weights/sv_ratio": Metric("", "`@LAYER`: largest over smallest singular value that is not 0 within rounding"),
    "weights/collapsed": Metric("fraction", "`@LAYER`: singular values near 0", "near 0"),
    "weights/effective_rank": Metric("", "`@LAYER`: fewest singular values that make up 99 % of their sum"),
    "weights/loglog_slope": Metric("", "`@LAYER`: slope of the singular values over their rank, log-log"),
    "weights/loglog_r2": Metric("", "`@LAYER`: R² of that line; 1: exact"),
    "machine/process_bytes": Metric("bytes", "resident memory of the process", kind="machine"),
    "machine/process_peak_bytes": Metric("bytes", "peak resident memory", kind="machine"),
    "machine/growth": Metric(
        "bytes/1e6 steps", "slope of the resident memory over the last half of the run", "near 0", kind="machine"
    ),
    "machine/gpu_bytes": Metric("bytes", "GPU memory allocated by tensors", kind="machine"),
    "machine/gpu_peak_bytes": Metric("bytes", "peak GPU memory allocated by tensors", kind="machine"),
    "eval/return_mean": Metric("reward", "mean return of a periodic or final evaluation, greedy actions"),
    "eval/return_mean_memory_cleared": Metric("reward", "the same with memory cleared before every step"),
    "eval/sampled_return_mean": Metric(
        "reward", "mean return of the final evaluation with sampled actions, of a quarter of the episodes, 250 or more"
    ),
}
CUSTOM = "custom/"
"""Prefix of the numbers of callbacks."""


def replay_error(metrics: Metrics) -> float | None:
    """Return the larger error of ratio and value: near a uniform policy, only the value shows an error."""
    names = ("memory/replay_error", "memory/replay_value_error")
    errors = [metrics[name] for name in names if name in metrics]
    return float(max(errors)) if errors else None


def alarms(metrics: Metrics, alarm_at: float = REPLAY_ALARM) -> Iterator[tuple[str, str]]:
    """Yield the kind and text of each alarm."""
    error = replay_error(metrics)
    if error is not None and error > alarm_at:
        yield (
            "replay",
            f"replay differs from the rollout by {error:.1e}; up to {alarm_at:.0e} is healthy. The memory is "
            "wrong: run `holdfast check` on this policy.",
        )
    done, due = metrics.get("memory/resets"), metrics.get("memory/resets_due")
    if done is not None and due is not None and done != due:
        yield (
            "resets",
            f"the hidden state was reset {done:,.0f} times for {due:,.0f} episode starts; both must be "
            "equal. Episodes leak into each other or are cut short: run `holdfast check` on this policy.",
        )
    norm = metrics.get("losses/grad_norm")
    if norm is not None and norm == 0:
        yield (
            "gradient",
            "the gradient norm is exactly 0: nothing is learned. Look for rewards that are all 0, or a detached loss.",
        )
    elif norm is not None and norm > GRADIENT_ALARM:
        yield (
            "gradient",
            f"the gradient norm before clipping is {short_number(float(norm))}; below "
            f"{GRADIENT_ALARM:,.0f} is healthy. Scale rewards down or lower trainer.optimizer.learning_rate.",
        )


def read_metrics(path: Path) -> dict[str, np.ndarray]:
    """Read a run's metrics.jsonl and machine.jsonl as arrays over iterations; NaN: not measured in that iteration.

    The final evaluation belongs to the last iteration. Lines that cannot be read are left out.
    """
    rows = dict[int, dict[str, int | float]]()
    for line in chain(read_lines(path), read_lines(path.with_name(MACHINE))):
        rows.setdefault(int(line["iteration"]), {}).update(line)
    ordered = [rows[iteration] for iteration in sorted(rows)]
    names = dict.fromkeys(name for row in ordered for name in row)
    return {name: np.array([row.get(name, math.nan) for row in ordered]) for name in names}


def read_lines(path: Path) -> Iterator[dict[str, int | float]]:
    """Read the numbers in the lines of a metrics file, one by one; lines that cannot be read are left out."""
    if path.exists():
        with path.open(errors="replace") as texts:
            yield from (line for line in map(_numbers_of, texts) if "iteration" in line)


def _numbers_of(text: str) -> dict[str, int | float]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    # No metric is NaN, infinite, or an integer of hundreds of digits.
    return {name: value for name, value in numbers.items() if abs(value) <= sys.float_info.max}


MACHINE = "machine.jsonl"
SHARED = ("iteration", "global_step")
"""Metrics that machine.jsonl repeats, so that its lines can be joined with those of metrics.jsonl."""


class MetricsFile:
    """Append one line per update to metrics.jsonl, flushed at once.

    Two runs of one seed write equal files, except for times; machine metrics go to machine.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self._machine_path = path.with_name(MACHINE)
        self._machine: FileIO | None = None
        self._file = _open(path)

    def write(self, metrics: Metrics) -> None:
        """Append one line; an unknown metric or a non-finite value is an error."""
        _require_known_and_finite(metrics)
        machine = {name for name in metrics if name.startswith("machine/")}
        self._append(self._file, {name: value for name, value in metrics.items() if name not in machine})
        if machine:
            if self._machine is None:
                self._machine = _open(self._machine_path)
            line = {name: value for name, value in metrics.items() if name in machine or name in SHARED}
            self._append(self._machine, line)

    def _append(self, file: FileIO, metrics: Metrics) -> None:
        line = (json.dumps(metrics, allow_nan=False) + "\n").encode()
        with writing(Path(str(file.name))):
            # A disk that is almost full takes a part.
            while line:
                line = line[file.write(line) :]

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._machine is not None:
            self._machine.close()


def _open(path: Path) -> FileIO:
    """Open for appending, without a buffer: closing a file must not repeat a write that failed."""
    with writing(path):
        return path.open("ab", buffering=0)


def _require_known_and_finite(metrics: Metrics) -> None:
    unknown = sorted(name for name in metrics if find_metric(name) is None)
    if unknown:
        raise ContractError(f"{unknown} are not in METRICS; describe them in report/metrics.py.")
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ContractError(
                f"{name} is {value} at iteration {metrics.get('iteration', '?')}; it must be a finite "
                "number. Leave out what was not measured."
            )
