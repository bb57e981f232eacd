"""Alarms about learning: numbers that stay unhealthy for several iterations."""

import math
from collections import deque
from collections.abc import Iterator
from statistics import fmean

from gymnasium import spaces

from holdfast.config.run import Config
from holdfast.report.metrics import Metrics
from holdfast.report.text import short_number
from holdfast.worlds import WorldSpec

SATURATION = 0.5
"""Largest healthy share of saturated units."""
VALUE_LOSS = 100.0
"""Largest healthy value loss; values within 1 of their returns have 0.5."""
EXPLAINED = 0.05
"""Least explained variance of values that follow their returns at all."""
COLLAPSED = 0.01
"""Share of its first value below which the entropy of choices, or the deviation of a Box's actions, has collapsed."""
PATIENCE = 5
"""Iterations that a number may be unhealthy for."""
SHARE = 0.5
"""Share of a run by which the return and the explained variance must have moved."""
LEAST_ITERATIONS = 20
"""Iterations before which neither is looked at."""
WINDOW = 5
"""Returns in a mean."""
RISE = 0.05
"""Least relative change of a return that has moved."""
REWARD = "trainer.normalize_reward=true"
STEPS_WITHOUT_END = 5000
"""Steps of each agent in which an episode must have ended."""


def missing_normalization(config: Config, *, has_tokens: bool) -> list[str]:
    """Return what to type for the normalization that is off; tokens are not normalized."""
    is_scaled = config.policy.normalize_value or config.trainer.normalize_reward
    obs = [] if has_tokens or config.policy.normalize_obs else ["policy.normalize_obs=true"]
    return obs + ([] if is_scaled else [REWARD])


class LearningAlarms:
    """Looks at the metrics of each iteration; each alarm has the number, since when, and what to type.

    While the return is higher than at first there is no alarm: a memory that holds something for long is saturated too.
    """

    def __init__(self, config: Config, spec: WorldSpec) -> None:
        self._config, self._best = config, spec.best_return
        self._normalization = missing_normalization(config, has_tokens=bool(spec.features))
        self._box_size = spec.action.shape[0] if isinstance(spec.action, spaces.Box) else 0
        self._since: dict[str, int] = {}
        self._first: list[float] = []
        self._recent = deque[float](maxlen=WINDOW)
        self._entropy: float | None = None
        self._episodes = 0.0

    def check(self, metrics: Metrics) -> Iterator[tuple[str, str]]:
        """Yield the kind and text of each alarm."""
        iteration = int(metrics["iteration"])
        self._episodes += metrics.get("charts/episodes", 0.0)
        if "charts/episodic_return" in metrics:
            number = float(metrics["charts/episodic_return"])
            self._first += [number] if len(self._first) < WINDOW else []
            self._recent.append(number)
        yield from self._memory_and_values(metrics, iteration)
        yield from self._exploration(metrics, iteration)
        yield from self._progress(metrics, iteration)

    def _memory_and_values(self, metrics: Metrics, iteration: int) -> Iterator[tuple[str, str]]:
        rate = self._config.trainer.optimizer.learning_rate
        fix = " ".join(self._normalization) or f"trainer.optimizer.learning_rate={rate / 4:g}"
        saturation, loss = metrics.get("memory/saturation"), metrics.get("losses/value_loss")
        has_risen = self._has_risen(unknown=False)
        since = self._streak("saturation", None if saturation is None else saturation > SATURATION, iteration)
        if since and saturation is not None and not has_risen:
            yield (
                "saturation",
                f"{100 * saturation:.0f} % of the hidden state is saturated, since iteration {since}; below "
                f"{100 * SATURATION:.0f} % is healthy. Saturated units neither change nor learn: type {fix}.",
            )
        since = self._streak("value loss", None if loss is None else loss > VALUE_LOSS, iteration)
        if since and loss is not None and not has_risen:
            yield (
                "value loss",
                f"the value loss is {short_number(loss)}, since iteration {since}; below {VALUE_LOSS:.0f} is healthy. "
                f"It dominates the gradient: type {fix}.",
            )

    def _exploration(self, metrics: Metrics, iteration: int) -> Iterator[tuple[str, str]]:
        entropy = metrics.get("losses/entropy")
        if entropy is None:
            return
        if self._entropy is None:
            self._entropy = float(entropy)
        since = self._streak("entropy", self._has_collapsed(entropy, self._entropy), iteration)
        if since and not self._has_risen(unknown=True):
            coef = max(0.01, 4 * self._config.trainer.ppo.ent_coef)
            yield (
                "entropy",
                f"the entropy fell from {short_number(self._entropy)} to {short_number(entropy)} nats, since iteration "
                f"{since}, and the return has not risen: one action is always taken. Type "
                f"trainer.ppo.ent_coef={coef:g}.",
            )

    def _has_collapsed(self, entropy: float, first: float) -> bool:
        """Whether the entropy is next to none; that of a Gaussian has no zero, but falls with its deviation."""
        if self._box_size:
            return (entropy - first) / self._box_size < math.log(COLLAPSED)
        return entropy < COLLAPSED * first

    def _progress(self, metrics: Metrics, iteration: int) -> Iterator[tuple[str, str]]:
        config, steps = self._config, iteration * self._config.rollout_length
        if not self._episodes and steps >= STEPS_WITHOUT_END:
            yield (
                "episodes",
                f"no episode has ended in {steps:,} steps of each agent, so nothing is known about returns. Give "
                "episodes a limit: world.wrappers='gymnasium.wrappers:TimeLimit(max_episode_steps=1000)' for a "
                "Gymnasium environment.",
            )
        explained = metrics.get("losses/explained_variance")
        since = self._streak("values", None if explained is None else explained < EXPLAINED, iteration)
        if iteration < max(LEAST_ITERATIONS, SHARE * config.iterations) or self._has_risen(unknown=True):
            return
        first, now = fmean(self._first), fmean(self._recent)
        explore = f"trainer.ppo.ent_coef={max(0.01, 2 * config.trainer.ppo.ent_coef):g}"
        if self._box_size and config.trainer.action_noise == "white":
            explore = "trainer.action_noise=pink"
        yield (
            "return",
            f"the return does not rise: {short_number(first, 3)} in the first iterations, {short_number(now, 3)} at "
            f"iteration {iteration:,} of {config.iterations:,}. If more is possible, type "
            f"{' '.join(self._normalization) or explore}, or give it more steps (trainer.total_timesteps).",
        )
        if since and explained is not None:
            fix = f"{REWARD}, or " if REWARD in self._normalization else ""
            yield (
                "values",
                f"values explain {100 * max(0.0, explained):.0f} % of the variance of returns, since iteration "
                f"{since}: advantages are noise. Type {fix}trainer.ppo.vf_coef={2 * config.trainer.ppo.vf_coef:g}.",
            )

    def _streak(self, kind: str, is_unhealthy: bool | None, iteration: int) -> int:
        """Return the first iteration of a streak of `PATIENCE` unhealthy ones, else 0; None: not measured."""
        if is_unhealthy is False:
            self._since.pop(kind, None)
        if not is_unhealthy:
            return 0
        since = self._since.setdefault(kind, iteration)
        return since if iteration - since + 1 >= PATIENCE else 0

    def _has_risen(self, *, unknown: bool) -> bool:
        """Whether the return is higher than at first, or the best possible; `unknown` before there are returns."""
        if len(self._first) < WINDOW:
            return unknown
        first, now = fmean(self._first), fmean(self._recent)
        if self._best is not None and now >= self._best - RISE * abs(self._best):
            return True
        return now - first > RISE * max(abs(first), abs(now), 1e-6)
