"""One parallel environment as one that takes everybody's actions and tells all that was said to them."""

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from holdfast.errors import ConfigError

PADS = {"observations": "supersuit:pad_observations_v0", "actions": "supersuit:pad_action_space_v0"}
"""What makes spaces equal that differ in size."""


@dataclass
class Told:
    """What one environment told its crowd, by their places in it."""

    reward: dict[int, float] = field(default_factory=dict)
    """Of those who acted."""
    terminated: list[int] = field(default_factory=list)
    truncated: list[int] = field(default_factory=list)
    obs: dict[int, Any] = field(default_factory=dict)
    """What those see who are there now."""
    joined: list[int] = field(default_factory=list)
    """Who of them was not there before."""
    last: dict[int, Any] = field(default_factory=dict)
    """What those saw last whose episode is over, as far as it was shown."""


class MemberError(Exception):
    """Something that is wrong with one of a crowd, and its place there; none: with all of it."""

    def __init__(self, told: str, place: int | None = None) -> None:
        super().__init__(told)
        self.told, self.place = told, place


class Crowd(gymnasium.Env[Any, Any]):
    """A parallel environment in which `names` may be, all of them with equal spaces.

    Everybody's actions lie side by side, those of who is away too, which are left out. What was told is given
    as it came, in one observation; the episode is over when nobody is there any more. `heard` makes sense
    of it.
    """

    def __init__(self, env: Any, name: str) -> None:
        self.inside = env
        try:
            self.names = list(env.possible_agents)
        except AttributeError as error:
            raise ConfigError(f"{name} does not say who may be there: it has no possible_agents.") from error
        if not self.names:
            raise ConfigError(f"{name}: its possible_agents are empty; somebody must be able to be there.")
        self.places = {agent: place for place, agent in enumerate(self.names)}
        self.sight = self._equal("observations", [env.observation_space(each) for each in self.names], name)
        self.act = self._equal("actions", [env.action_space(each) for each in self.names], name)
        self.action_space = batch_space(self.act, len(self.names))
        self.there: list[Any] = []
        """Who is there now, by names."""

    @property
    def np_random(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]  # read only
        """The environment's own generator, if it shows one."""
        return getattr(self.inside.unwrapped, "np_random", None)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Open an episode."""
        obs, _ = self.inside.reset(seed=seed, options=options)
        # A list that some go on writing to.
        self.there = list(self.inside.agents)
        return {"obs": obs, "agents": tuple(self.there)}, {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Let those act who are there."""
        taken = {each: action[self.places[each]] for each in self.there}
        obs, reward, terminated, truncated, _ = self.inside.step(taken)
        self.there = list(self.inside.agents)
        told = {"obs": obs, "reward": reward, "terminated": terminated, "truncated": truncated}
        return {**told, "agents": tuple(self.there)}, 0.0, not self.there, False, {}

    def close(self) -> None:
        """Close the environment."""
        self.inside.close()

    def opened(self, seen: dict[str, Any]) -> Told:
        """Read what was told at the start of an episode."""
        told = Told()
        if not seen["agents"]:
            raise MemberError("nobody is there when its episode begins: agents is empty after reset()")
        self._look(seen, told)
        told.joined = list(told.obs)
        return told

    def heard(self, before: list[Any], seen: dict[str, Any]) -> Told:
        """Read what was told after `before` acted: who goes on, who joins, and whose episode is over how."""
        told = Told()
        for place, agent in ((self.places[each], each) for each in before):
            told.reward[place] = float(self._of(seen, "reward", agent))
            ends = [bool(self._of(seen, flag, agent)) for flag in ("terminated", "truncated")]
            told.terminated += [place] * ends[0]
            told.truncated += [place] * ends[1]
            if True in ends:
                self._leave(seen, told, agent, cut=ends == [False, True])
            elif agent not in seen["agents"]:
                raise MemberError(
                    "it is not in agents any more, but neither terminated nor truncated; tell how its "
                    "episode ended in the step in which it leaves",
                    place,
                )
        self._look(seen, told)
        told.joined = [place for place in told.obs if self.names[place] not in before]
        return told

    def _leave(self, seen: dict[str, Any], told: Told, agent: Any, cut: bool) -> None:
        place = self.places[agent]
        if agent in seen["agents"]:
            raise MemberError(
                "its episode is over (terminated, truncated) and it is still in agents; take it out, it may "
                "join again in a later step",
                place,
            )
        if agent in seen["obs"]:
            told.last[place] = seen["obs"][agent]
        elif cut:
            raise MemberError("it was truncated, and what it saw last is not among the observations", place)

    def _look(self, seen: dict[str, Any], told: Told) -> None:
        strangers = [agent for agent in seen["agents"] if agent not in self.places]
        if strangers:
            raise MemberError(f"agents has {strangers[0]!r}, who is not in possible_agents")
        for place in sorted(self.places[agent] for agent in seen["agents"]):
            told.obs[place] = self._of(seen, "obs", self.names[place])

    def _of(self, seen: dict[str, Any], what: str, agent: Any) -> Any:
        """Take what was told to one; rewards may have a default of the environment's."""
        try:
            return seen[what][agent]
        except (KeyError, TypeError) as error:
            word = "observation" if what == "obs" else what
            raise MemberError(f"it is told no {word}", self.places[agent]) from error

    def _equal(self, what: str, found: list[spaces.Space[Any]], name: str) -> spaces.Space[Any]:
        """Refuse spaces that differ: one policy sees and acts for all."""
        for agent, space in zip(self.names, found, strict=True):
            if space != found[0]:
                raise ConfigError(
                    f"{name}: the {what} of {self.names[0]} are {found[0]}, those of {agent} are {space}; "
                    f"all must be equal. If they differ in size, pad them: world.wrappers={PADS[what]}."
                )
        return found[0]
