"""An environment that knows whose it is, so that an error can name the agent; and what it lived through."""

from copy import deepcopy
from typing import Any

import gymnasium

from holdfast.worlds.gym.diary import LONGEST, Diary, actions_in, same


class FaultError(Exception):
    """Something an environment did wrong, and whose it is; the world adds its name and the step."""

    def __init__(self, told: str, agent: int | None = None) -> None:
        super().__init__(told)
        self.told, self.agent = told, agent


class Numbered(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One agent's environment: what it raises is a `FaultError` that names the agent.

    What was last seen of an episode is copied, because the restart may overwrite it where it lies. Infos
    are left out: no world reads them, and joining those of many environments is slow and may fail.

    It keeps a diary, from which it lives an episode again to get where it was.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], agent: int) -> None:
        super().__init__(env)
        self.agent = agent
        self.seen: Any = None
        """What it showed last, to find out later what did not fit."""
        self.past: dict[str, Any] = {}
        """What is to be lived again, and the seed to begin anew with otherwise."""
        self._diary = Diary(env)
        # Put back behind its end: the reset that was due then is the answer to the next step.
        self._due = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset the environment; options that say nothing are none: ways to restart differ in that."""
        self._due = False
        self._diary.begin(seed)
        try:
            self.seen, _ = self.env.reset(seed=seed, options=options or None)
        except Exception as error:
            raise self._fault("reset", error) from error
        self._diary.saw(self.seen)
        return self.seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment."""
        if self._due:
            return self.reset()[0], 0.0, False, False, {}
        self._diary.note(action)
        try:
            self.seen, reward, terminated, truncated, _ = self.env.step(action)
            ended = bool(terminated), bool(truncated)
            reward = float(reward)
        except Exception as error:
            raise self._fault("step", error) from error
        self._diary.saw(self.seen, reward, ended)
        if True not in ended:
            return self.seen, reward, *ended, {}
        return deepcopy(self.seen), reward, *ended, {}

    def tell_where(self) -> dict[str, Any]:
        """Say where the environment is, by how it got there."""
        return self._diary.told()

    def live_again(self) -> tuple[str, Any]:
        """Live the episode in `past` again; if that leads elsewhere, begin anew, say why and what is seen.

        Nothing is raised where the environment is at fault: it may live in a process that would end by it.
        """
        past, self.past = self.past, {}
        why = self._lived_again(past["episode"])
        if not why:
            self._due = self._diary.over
            return "", None
        return why, self.reset(seed=past["otherwise"])[0]

    def _lived_again(self, told: dict[str, Any]) -> str:
        if told["actions"] is None:
            return f"an episode of more than {LONGEST:,} actions is not lived again"
        try:
            if told["before"] is not None:
                self._diary.set_generator(told["before"])
            self.reset(seed=told["seed"])
            for action in actions_in(told["actions"], self.env.action_space):
                if self._diary.over:
                    return "lived again, its episode ends earlier: more decides it than seed and actions"
                self.step(action)
        except Exception as error:
            return f"its episode cannot be lived again: {said(error)}"
        if same(self.tell_where(), told):
            return ""
        return "lived again, its episode is another one: more decides it than seed and actions"

    def _fault(self, doing: str, error: Exception) -> FaultError:
        return FaultError(f"{doing}() failed with {said(error)}", self.agent)


def said(error: Exception) -> str:
    """Say an error on one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
