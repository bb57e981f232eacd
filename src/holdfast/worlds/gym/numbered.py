"""An environment that knows whose it is, so that an error can name the agent."""

from copy import deepcopy
from typing import Any

import gymnasium


class FaultError(Exception):
    """Something an environment did wrong, and whose it is; the world adds its name and the step."""

    def __init__(self, told: str, agent: int | None = None) -> None:
        super().__init__(told)
        self.told, self.agent = told, agent


class Numbered(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One agent's environment: what it raises is a `FaultError` that names the agent.

    What was last seen of an episode is copied, because the restart may overwrite it where it lies. Infos
    are left out: no world reads them, and joining those of many environments is slow and may fail.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], agent: int) -> None:
        super().__init__(env)
        self.agent = agent
        self.seen: Any = None
        """What it showed last, to find out later what did not fit."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; options that say nothing are none: ways to restart differ in that."""
        try:
            self.seen, _ = self.env.reset(seed=seed, options=options or None)
        except Exception as error:
            raise self._fault("reset", error) from error
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment."""
        try:
            self.seen, reward, terminated, truncated, _ = self.env.step(action)
            ended = bool(terminated), bool(truncated)
            reward = float(reward)
        except Exception as error:
            raise self._fault("step", error) from error
        return deepcopy(self.seen) if True in ended else self.seen, reward, *ended, {}

    def _fault(self, doing: str, error: Exception) -> FaultError:
        return FaultError(f"{doing}() failed with {said(error)}", self.agent)


def said(error: Exception) -> str:
    """Say an error on one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
