"""A script of environments whose observations say which environment and step they belong to."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.errors import ContractError
from holdfast.types import Float, Int, Tensor

ENVS, WIDTH, ACTIONS = 8, 8, 3
LIMIT = 4096
"""Most steps of each environment: a trainer that does not end is stopped."""
BASE = 10_000
"""An observation's number is `BASE * env + frame`; final observations count as frames too."""
UNIT = 2.0**-20
"""The first column holds the number in this unit, exact in float32 and small beside the others."""
LENGTHS = (5, 1, 9, 2, 3, 1, 17, 6, 40, 4, 12, 1, 8)
"""Lengths of episodes; each environment begins elsewhere."""
KINDS = ((True, False), (False, True), (False, True), (True, False), (True, True))
"""Flags that end episodes: terminated, truncated."""
NONE = -1
"""Stands for no observation."""


@dataclass(frozen=True)
class Transition:
    """One step of all environments."""

    ids: Int[np.ndarray, " E"]
    """The observations acted on."""
    reward: Float[np.ndarray, " E"]
    terminated: np.ndarray
    truncated: np.ndarray
    next_ids: Int[np.ndarray, " E"]
    """The observations that follow, the first of the next episode where one ended."""
    final_ids: Int[np.ndarray, " E"]
    """The last observations of episodes that ended, NONE elsewhere."""

    @property
    def ended(self) -> np.ndarray:
        """Where an episode ended."""
        return self.terminated | self.truncated


@dataclass
class Episodes:
    """Where one environment is in its script."""

    env: int
    number: int = 0
    frame: int = 0
    steps: int = 0
    """Steps of this episode."""

    @property
    def length(self) -> int:
        """Steps of this episode until its end."""
        return LENGTHS[(self.number + 5 * self.env) % len(LENGTHS)]

    @property
    def flags(self) -> tuple[bool, bool]:
        """The flags at its end."""
        return KINDS[(self.number + 2 * self.env) % len(KINDS)]

    def next_id(self) -> int:
        """Return the number of the next observation."""
        self.frame += 1
        return BASE * self.env + self.frame


@dataclass
class TrainerScript:
    """What all environments return, and what they returned so far."""

    envs: int = ENVS
    width: int = WIDTH
    transitions: list[Transition] = field(default_factory=list)
    first: set[int] = field(default_factory=set)
    """Observations that open an episode."""
    steps: dict[int, int] = field(default_factory=dict)
    """The number of the step that returned an observation."""
    before: dict[int, int] = field(default_factory=dict)
    """The observation before, in the same environment: of the previous episode for its first one."""
    final: set[int] = field(default_factory=set)
    """Last observations of episodes, which are not acted on."""
    current: Int[np.ndarray, " E"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    latest_final: Int[np.ndarray, " E"] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    on_step: Callable[[int], None] = lambda step: None
    """Is called with the number of steps of each environment."""

    def __post_init__(self) -> None:
        columns = np.random.default_rng(0).normal(size=(self.envs, BASE // 4, self.width)).astype(np.float32)
        # A frame's row repeats after BASE / 4 frames, but for its number.
        self._columns = columns
        self._episodes = [Episodes(env) for env in range(self.envs)]

    def reset(self) -> Int[np.ndarray, " E"]:
        """Start all environments; a second reset opens new episodes."""
        ids = [self._open(episodes, NONE) for episodes in self._episodes]
        self.current, self.latest_final = np.array(ids), np.full(self.envs, NONE)
        return self.current

    def step(self) -> Transition:
        """Take one step in all environments; actions have no effect."""
        if not len(self.current):
            raise ContractError("The trainer called step before reset; call envs.reset() first.")
        if len(self.transitions) >= LIMIT:
            raise ContractError(f"The trainer took {LIMIT} steps of each environment and did not end; train less.")
        count = len(self.transitions)
        self.on_step(count)
        rewards = np.random.default_rng([1, count]).uniform(-1, 1, self.envs).astype(np.float32)
        flags = np.zeros((2, self.envs), dtype=bool)
        finals, following = np.full(self.envs, NONE), np.zeros(self.envs, dtype=np.int64)
        for env, episodes in enumerate(self._episodes):
            episodes.steps += 1
            current = int(self.current[env])
            if episodes.steps >= episodes.length:
                flags[:, env] = episodes.flags
                finals[env] = self._add(episodes, current, count + 1)
                self.final.add(int(finals[env]))
                episodes.number += 1
                following[env] = self._open(episodes, current)
            else:
                following[env] = self._add(episodes, current, count + 1)
        transition = Transition(self.current, rewards, flags[0], flags[1], following, finals)
        self.transitions.append(transition)
        self.current, self.latest_final = following, finals
        return transition

    def _open(self, episodes: Episodes, before: int) -> int:
        episodes.steps = 0
        number = self._add(episodes, before, len(self.transitions) + (before != NONE))
        self.first.add(number)
        return number

    def _add(self, episodes: Episodes, before: int, step: int) -> int:
        number = episodes.next_id()
        self.steps[number], self.before[number] = step, before
        return number

    def observations(self, ids: Int[np.ndarray, " E"]) -> Float[np.ndarray, "E D"]:
        """Return observations by their numbers; zeros for NONE."""
        env, frame = np.divmod(np.maximum(ids, 0), BASE)
        rows = self._columns[env, frame % self._columns.shape[1]].copy()
        rows[:, 0] = ids * UNIT
        return np.where(ids[:, None] == NONE, np.float32(0), rows).astype(np.float32)

    def read_ids(self, x: Tensor) -> Tensor | None:
        """Return the numbers of the observations a tensor begins with, NONE for other rows; None if it has none."""
        if not x.is_floating_point() or x.dim() < 1 or x.shape[-1] < self.width or not x.numel():
            return None
        codes = x[..., 0].double().cpu() / UNIT
        maybe = (codes == codes.round()) & (codes > 0) & (codes < BASE * self.envs)
        if not bool(maybe.any()):
            return None
        rows, numbers = x[..., : self.width].double().cpu()[maybe], codes[maybe].long()
        same = (rows - torch.from_numpy(self.observations(numbers.numpy()))).abs().amax(-1) < 1e-6
        ids = torch.full(codes.shape, NONE)
        ids[maybe] = torch.where(same, numbers, NONE)
        return ids if bool(same.any()) else None

    def env(self, number: int) -> int:
        """Return the environment of an observation."""
        return number // BASE

    def place(self, number: int) -> str:
        """Name an observation for a reader: environment and step."""
        name = f"env {number // BASE}, step {self.steps.get(number, NONE)}"
        return f"{name}, final observation" if number in self.final else name
