"""What a report measures on a trained policy: reach, returns with ablated memory, returns by delay."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from warnings import warn

import torch

from holdfast.build import load_policy
from holdfast.check.adapters.holdfast import HoldfastPolicy
from holdfast.check.laws import one_thread
from holdfast.check.quick_reach import quick_reach
from holdfast.check.results import Reach
from holdfast.checkpoint.run_dir import Log
from holdfast.config.run import Config, override
from holdfast.config.worlds import WorldConfig
from holdfast.errors import HoldfastError, error_text, one_line
from holdfast.evaluation.evaluate import MemoryMode, evaluate
from holdfast.evaluation.held_out import held_out_seed, held_out_world, num_agents_for
from holdfast.policies import LSTMWrapper
from holdfast.report.run_data import RunData
from holdfast.rng import isolated_rng
from holdfast.worlds import WorldSpec

EPISODES = 100
SEED_NUMBER = -2
"""Other held-out seeds than those of the periodic and the final evaluation."""
MODES: tuple[MemoryMode, ...] = ("intact", "cleared", "frozen", "shuffled")
EVALUATED: dict[MemoryMode, str] = {"intact": "eval/return_mean", "cleared": "eval/return_mean_memory_cleared"}
"""Modes whose returns the final evaluation has."""
AT_END_S, ON_REQUEST_S = 1.5, 120.0
"""Estimated seconds for returns at the end of training, and for `holdfast report`."""
MAX_STEPS = 10_000


@dataclass(frozen=True)
class PolicyMeasurements:
    """Measurements of one policy; `notes` says why one is missing, by its name."""

    reach: Reach | None = None
    returns: Mapping[str, float] = field(default_factory=dict)
    """Mean greedy return by memory mode, of `EPISODES` episodes."""
    delays: tuple[tuple[int, float], ...] = ()
    """Mean greedy return by delay."""
    best: float | None = None
    best_without_memory: float | None = None
    has_memory: bool = True
    notes: Mapping[str, str] = field(default_factory=dict)


def measure_run(run: RunData, log: Log = warn) -> PolicyMeasurements:
    """Load the newest policy of a run and measure it; `log` reports damaged files."""
    try:
        policy, config = load_policy(run.folder, torch.device("cpu"), log)
    except (HoldfastError, OSError) as error:
        reason = f"The policy cannot be loaded: {one_line(error, 300)}"
        return PolicyMeasurements(notes=dict.fromkeys(("reach", "returns", "delays"), reason))
    spec = policy.binding.spec
    assert spec is not None, "a loaded policy is bound to its world"
    return measure_policy(policy, spec, config, run, limit_s=ON_REQUEST_S)


def measure_policy(
    policy: LSTMWrapper, spec: WorldSpec, config: Config, run: RunData, *, limit_s: float
) -> PolicyMeasurements:
    """Measure a policy: its reach in any case, returns as far as they are estimated to take `limit_s` seconds."""
    notes = dict[str, str]()
    arrays = None
    with one_thread(), isolated_rng(held_out_seed(config, SEED_NUMBER)):
        try:
            arrays = quick_reach(HoldfastPolicy(policy, spec))
        except Exception as error:
            notes["reach"] = f"The reach cannot be measured: {error_text(error, 300)}"
        returns, delays = dict[str, float](), list[tuple[int, float]]()
        if policy.has_memory():
            budget = _Budget(run, config, limit_s)
            returns = _try(notes, "returns", lambda: _returns(policy, config, run, budget)) or {}
            delays = _try(notes, "delays", lambda: _by_delay(policy, config, budget)) or []
    limits = {"best": spec.best_return, "best_without_memory": spec.best_return_without_memory}
    return PolicyMeasurements(arrays, returns, tuple(delays), has_memory=policy.has_memory(), notes=notes, **limits)


class _TooLongError(HoldfastError):
    """A measurement is estimated to take too long."""


class _Budget:
    """Seconds that evaluations may take, by the time that steps took in training."""

    def __init__(self, run: RunData, config: Config, seconds: float) -> None:
        self.left, self._name = seconds, run.folder
        steps = max(1, config.rollout_length)
        per_iteration = [run.last(name) or 0.0 for name in ("time/world", "time/forward")]
        self._step_s = max(0.002, sum(per_iteration) / steps)

    def covers(self, steps: float) -> bool:
        """Whether so many more steps fit; if so, they are taken from it."""
        if steps * self._step_s > self.left:
            return False
        self.left -= steps * self._step_s
        return True

    def require(self, steps: float) -> None:
        """Raise if so many steps do not fit."""
        if not self.covers(steps):
            raise _TooLongError(
                f"It takes about {steps * self._step_s:,.0f} s, too long for this report: "
                f"holdfast report {self._name} measures it, or holdfast eval {self._name} --memory all."
            )


def _try(notes: dict[str, str], name: str, measurement: Any) -> Any:
    """Return a measurement, or note why there is none: a report shows what could be measured."""
    try:
        return measurement()
    except _TooLongError as error:
        notes[name] = str(error)
    except Exception as error:
        notes[name] = f"It cannot be measured: {error_text(error, 300)}"
    return None


def _returns(policy: LSTMWrapper, config: Config, run: RunData, budget: _Budget) -> dict[str, float]:
    """Return the mean return by memory mode; those that the final evaluation has are not measured again."""
    evaluated = {mode: run.last(name) for mode, name in EVALUATED.items()}
    length = run.last("charts/episodic_length")
    if length is None:
        raise HoldfastError("no episode ended during training")
    returns: dict[str, float] = {mode: value for mode, value in evaluated.items() if value is not None}
    missing: list[MemoryMode] = [mode for mode in MODES if mode not in returns]
    budget.require(length * len(missing))
    for mode in missing:
        returns[mode] = _mean_return(policy, config, config.world, mode)
    return {mode: returns[mode] for mode in MODES}


def _by_delay(policy: LSTMWrapper, config: Config, budget: _Budget) -> list[tuple[int, float]]:
    """Return the mean return by delay, up to twice the BPTT horizon, as far as the time lasts."""
    if "delay" not in type(config.world).model_fields:
        raise HoldfastError("this world has no delay")
    limit, points = 2 * config.trainer.bptt_horizon, list[tuple[int, float]]()
    trained = config.world.model_dump()["delay"]
    longest = trained[1] if isinstance(trained, tuple) else trained
    for delay in sorted({2**power for power in range(12)} | {longest}):
        if delay > max(limit, 2 * longest) or not budget.covers(delay + 2):
            break
        world = override(config, {"world.delay": delay}).world
        points.append((delay, _mean_return(policy, config, world, "intact")))
    if len(points) < 2:
        budget.require(3 * longest)
    return points


def _mean_return(policy: LSTMWrapper, config: Config, world_config: WorldConfig, mode: MemoryMode) -> float:
    spec, device = policy.binding.spec, next(policy.parameters()).device
    assert spec is not None, "a trained policy is bound to its world"
    agents, seed = num_agents_for(world_config, spec, EPISODES), held_out_seed(config, SEED_NUMBER)
    with held_out_world(world_config, device, agents, seed) as world:
        return evaluate(policy, world, episodes=agents, memory=mode, seed=seed, max_steps=MAX_STEPS).return_mean
