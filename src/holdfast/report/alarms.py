"""Alarms about learning: numbers that stay unhealthy for several iterations."""

from collections import deque
from collections.abc import Iterator
from statistics import fmean

from holdfast.config.run import Config
from holdfast.report.metrics import Metrics
from holdfast.report.text import short_number

SATURATION = 0.5
"""Largest healthy share of saturated units."""
VALUE_LOSS = 100.0
"""Largest healthy value loss; values within 1 of their returns have 0.5."""
EXPLAINED = 0.05
"""Least explained variance of values that follow their returns at all."""
COLLAPSED = 0.01
"""Share of its first value below which the entropy has collapsed."""
PATIENCE = 5
"""Iterations that saturation and value loss may be unhealthy for."""
SHARE = 0.5
"""Share of a run by which the return and the explained variance must have moved."""
LEAST_ITERATIONS = 20
"""Iterations before which neither is looked at."""
WINDOW = 5
"""Returns in a mean."""
RISE = 0.05
"""Least relative change of a return that has moved."""
STEPS_WITHOUT_END = 5000
"""Steps of each agent in which an episode must have ended."""


class LearningAlarms:
    """Looks at the metrics of each iteration; each alarm has the number, since when, and what to type."""

    def __init__(self, config: Config, best_return: float | None = None, first_iteration: int = 0) -> None:
        self._config, self._best, self._first_iteration = config, best_return, first_iteration
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
        yield from self._exploration(metrics)
        yield from self._progress(metrics, iteration)

    def _memory_and_values(self, metrics: Metrics, iteration: int) -> Iterator[tuple[str, str]]:
        saturation, policy = metrics.get("memory/saturation", 0.0), self._config.policy
        if since := self._streak("saturation", saturation > SATURATION, iteration):
            fix = self._lower_rate() if policy.normalize_obs else "policy.normalize_obs=true"
            yield (
                "saturation",
                f"{100 * saturation:.0f} % of the hidden state is saturated, since iteration {since}; below "
                f"{100 * SATURATION:.0f} % is healthy. Saturated units neither change nor learn: type {fix}.",
            )
        loss = metrics.get("losses/value_loss", 0.0)
        if since := self._streak("value loss", loss > VALUE_LOSS, iteration):
            fix = self._lower_rate() if policy.normalize_value else "policy.normalize_value=true"
            yield (
                "value loss",
                f"the value loss is {short_number(loss)}, since iteration {since}; below {VALUE_LOSS:.0f} is healthy. "
                f"It drowns the policy's gradient: type {fix}.",
            )

    def _exploration(self, metrics: Metrics) -> Iterator[tuple[str, str]]:
        entropy = metrics.get("losses/entropy")
        if entropy is None:
            return
        if self._entropy is None:
            self._entropy = float(entropy)
        if entropy < COLLAPSED * self._entropy and not self._has_moved():
            coef = max(0.01, 4 * self._config.trainer.ppo.ent_coef)
            yield (
                "entropy",
                f"the entropy fell from {short_number(self._entropy)} to {short_number(float(entropy))} nats, and the "
                f"return has not risen: one action is always taken. Type trainer.ppo.ent_coef={coef:g}.",
            )

    def _progress(self, metrics: Metrics, iteration: int) -> Iterator[tuple[str, str]]:
        config, done = self._config, iteration - self._first_iteration
        steps = done * config.rollout_length
        if not self._episodes and steps >= STEPS_WITHOUT_END:
            yield (
                "episodes",
                f"no episode has ended in {steps:,} steps of each agent, so nothing is known about returns. Give "
                "episodes a limit: world.wrappers='gymnasium.wrappers:TimeLimit(max_episode_steps=1000)' for a "
                "Gymnasium environment.",
            )
        is_late = done >= LEAST_ITERATIONS and iteration >= SHARE * config.iterations
        if not is_late or not self._recent or self._has_moved():
            return
        first, now = fmean(self._first), fmean(self._recent)
        yield (
            "return",
            f"the return does not rise: {short_number(first, 3)} in the first iterations, {short_number(now, 3)} at "
            f"iteration {iteration:,} of {config.iterations:,}. Type {self._faster()}, or give it more steps "
            "(trainer.total_timesteps).",
        )
        explained = metrics.get("losses/explained_variance", 1.0)
        if explained < EXPLAINED:
            yield (
                "values",
                f"values explain {100 * max(0.0, explained):.0f} % of the variance of returns at iteration "
                f"{iteration:,}: advantages are noise. Type policy.normalize_value=true, or "
                f"trainer.ppo.vf_coef={2 * config.trainer.ppo.vf_coef:g}.",
            )

    def _streak(self, kind: str, unhealthy: bool, iteration: int) -> int:
        """Return the first iteration of a streak of `PATIENCE` unhealthy ones, else 0."""
        if not unhealthy:
            self._since.pop(kind, None)
            return 0
        since = self._since.setdefault(kind, iteration)
        return since if iteration - since + 1 >= PATIENCE else 0

    def _has_moved(self) -> bool:
        """Whether the return is higher than at first, or the best possible; unknown before there are returns."""
        if len(self._first) < WINDOW:
            return True
        first, now = fmean(self._first), fmean(self._recent)
        if self._best is not None and now >= self._best - RISE * abs(self._best):
            return True
        return now - first > RISE * max(abs(first), abs(now), 1e-6)

    def _lower_rate(self) -> str:
        return f"trainer.optimizer.learning_rate={self._config.trainer.optimizer.learning_rate / 4:g}"

    def _faster(self) -> str:
        policy = self._config.policy
        names = [name for name in ("normalize_obs", "normalize_value") if not getattr(policy, name)]
        if names:
            return " ".join(f"policy.{name}=true" for name in names)
        return f"trainer.ppo.ent_coef={max(0.01, 2 * self._config.trainer.ppo.ent_coef):g}"
