"""TensorWorld: base of worlds on tensors; its step as a CUDA graph."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from holdfast import rng
from holdfast.cuda_graphs import caller_records
from holdfast.errors import ConfigError, ContractError
from holdfast.state_tree import get_field, get_tensor_like, mismatch, require_equal
from holdfast.types import Bool, Int, Shaped, Tensor, UInt8
from holdfast.worlds import tokens
from holdfast.worlds.obs import FLAGS, check_actions
from holdfast.worlds.step import Device, Step, WorldSpec

WARM_UPS = 3
"""Steps before capture, so that all lazy initialization is done."""


class CudaGraphStep:
    """Replays a step of a TensorWorld as a CUDA graph.

    The world's state is in fixed tensors, which are its attributes: the graph reads them and writes them
    back. The returned step is a copy, so the next one does not overwrite it.
    """

    def __init__(self, world: Any, advance: Callable[[Tensor], Step], actions: Int[Tensor, " A"]) -> None:
        self._actions = torch.zeros_like(actions)
        before = own_tensors(world)
        saved = {name: tensor.clone() for name, tensor in before.items()}
        state_names = self._find_state(world, advance, before)
        # The warm-up steps changed the world: restore it.
        vars(world).update(saved)
        self._state = {name: saved[name] for name in state_names}
        self._graph = torch.cuda.CUDAGraph()
        # Free unused graphs now: freeing one during capture would break the capture.
        gc.collect()
        with torch.cuda.graph(self._graph):
            step = advance(self._actions)
            for name, tensor in self._state.items():
                tensor.copy_(vars(world)[name])
            self._step, self._flags = step, torch.stack([getattr(step, name) for name in FLAGS])
        vars(world).update(self._state)

    def _find_state(self, world: Any, advance: Callable[[Tensor], Step], before: dict[str, Tensor]) -> list[str]:
        """Return the attributes that a step replaces or writes into."""
        versions = {name: tensor._version for name, tensor in before.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                advance(self._actions)
        torch.cuda.current_stream().wait_stream(stream)
        after = own_tensors(world)
        if after.keys() != before.keys():
            new = ", ".join(sorted(after.keys() - before.keys()))
            raise ContractError(f"{type(world).__name__} creates {new} in a step; create it in __init__.")
        return [
            name for name, tensor in before.items() if after[name] is not tensor or tensor._version != versions[name]
        ]

    def load(self, world: Any) -> None:
        """Copy the world's current state, after a reset, into the fixed tensors.

        The world is an argument, not an attribute: a reference cycle would be freed at any time, also during
        the capture of another graph, which would break it.
        """
        for name, tensor in self._state.items():
            current = vars(world)[name]
            if current is not tensor:
                tensor.copy_(current)
                vars(world)[name] = tensor

    def restore(self, world: Any, tensors: dict[str, Tensor]) -> None:
        """Set the world's tensors; the graph reads those that no step writes at their captured addresses."""
        for name, tensor in tensors.items():
            if name in self._state:
                vars(world)[name] = tensor
            else:
                vars(world)[name].copy_(tensor)

    def step(self, actions: Int[Tensor, " A"]) -> Step:
        """Replay the step."""
        self._actions.copy_(actions)
        self._graph.replay()
        # One copy of all flags, which saves launches.
        flags = dict(zip(FLAGS, self._flags.clone(), strict=True))
        last_obs = None if self._step.last_obs is None else self._step.last_obs.clone()
        return Step(self._step.obs.clone(), self._step.reward.clone(), last_obs=last_obs, **flags)


def own_tensors(world: Any) -> dict[str, Tensor]:
    """Return the tensors among a world's attributes."""
    return {name: value for name, value in vars(world).items() if isinstance(value, Tensor)}


IntRange = int | tuple[int, int]
"""A number, or the bounds to draw it from."""
GridCell = tuple[int, int]
"""Row and column of a grid."""
MOVES: dict[str, GridCell] = {"move_north": (-1, 0), "move_south": (1, 0), "move_west": (0, -1), "move_east": (0, 1)}
FULL = 255
"""The value of one-hot tokens: the full scale of their normalization. At a hundredth of it, policies did not learn."""


@dataclass(frozen=True)
class Outcome:
    """The result of the actions, before the next episodes start."""

    reward: Shaped[Tensor, " A"]
    ended: Bool[Tensor, " A"]
    begins: Bool[Tensor, " A"] | None = None
    """Where the next episode starts; None: where one ended."""
    valid: Bool[Tensor, " A"] | None = None
    """Which rows are valid; None: all."""
    trial: Bool[Tensor, " A"] | None = None
    """Where a new trial starts; None: nowhere."""
    last: UInt8[Tensor, "A M 3"] | None = None
    """The final observations, with `truncate`; None: `_observe()` after the transition."""


class TensorWorld(ABC):
    """Base of worlds that step all agents on one device, as batched tensor operations.

    A subclass defines `_start_episodes`, `_transition` and `_observe`. They use masks and never read a value on the
    host, so the host does not wait for the device. Random numbers are functions of (seed, agent, clock). With
    `truncate`, an option of most of them, episodes end by truncation instead of termination.

    On a GPU the first step captures a CUDA graph, and later steps replay it, which saves some forty kernel
    launches. So all state must be in tensor attributes that exist before the first step.
    """

    def __init__(self, agents: int, spec: WorldSpec, *, seed: int, device: Device) -> None:
        if agents < 1:
            raise ConfigError(f"world.agents={agents}: there must be at least 1.")
        self.agents, self.spec, self.seed = agents, spec, seed
        self.truncate = spec.truncates == "always"
        self._agent = torch.arange(agents, device=device)
        self._no_agents = torch.zeros(agents, dtype=torch.bool, device=device)
        self._all_agents = ~self._no_agents
        self._clock = torch.zeros((), dtype=torch.long, device=device)
        self._started = self._opening = False
        self._graph_step: CudaGraphStep | None = None

    def set_agent_offset(self, first_agent: int) -> None:
        """Number the agents from `first_agent` on, as a shard of a larger world; call it before `reset()`."""
        self._agent = self._agent + first_agent

    @abstractmethod
    def _start_episodes(self, mask: Bool[Tensor, " A"]) -> None:
        """Start the next episode of some agents; with `_opening`, the first one of all agents."""

    @abstractmethod
    def _transition(self, actions: Int[Tensor, " A"]) -> Outcome:
        """Apply the actions, and return rewards and ends."""

    @abstractmethod
    def _observe(self, first: Bool[Tensor, " A"]) -> UInt8[Tensor, "A M 3"]:
        """Return the current observations."""

    def reset(self) -> Step:
        """Start every agent's first episode."""
        self._clock = torch.zeros_like(self._clock)
        self._started = self._opening = True
        self._start_episodes(self._all_agents)
        self._opening = False
        outcome = Outcome(torch.zeros_like(self._agent), self._no_agents)
        return self._make_step(outcome, self._all_agents, self._empty_obs() if self.truncate else None)

    def step(self, actions: Int[Tensor, " A"]) -> Step:
        """Take one action per agent; finished episodes restart."""
        if not self._started:
            raise ContractError("Call reset() before the first step().")
        check_actions(actions, self.agents, len(self.spec.action_names))
        if actions.device.type != "cuda" or caller_records():
            return self._advance(actions)
        with torch.cuda.device(actions.device):
            if self._graph_step is None:
                self._graph_step = CudaGraphStep(self, self._advance, actions)
            self._graph_step.load(self)
            return self._graph_step.step(actions)

    def state(self) -> dict[str, Any]:
        """Return all tensor attributes; random numbers need no state besides the clock."""
        if not self._started:
            raise ContractError("Call reset() before state().")
        tensors = {name: tensor.clone() for name, tensor in own_tensors(self).items()}
        return {"seed": self.seed, "tensors": tensors}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a world made with the same arguments."""
        require_equal(state, "seed", self.seed)
        saved, current = get_field(state, "tensors", dict), own_tensors(self)
        unknown = sorted(str(name) for name in saved.keys() - current.keys())
        if unknown:
            raise mismatch(f"{type(self).__name__} has no {unknown[0]!r}")
        tensors = {name: get_tensor_like(saved, name, tensor) for name, tensor in current.items()}
        if self._graph_step is None:
            vars(self).update(tensors)
        else:
            self._graph_step.restore(self, tensors)
        self._started = True

    def _advance(self, actions: Int[Tensor, " A"]) -> Step:
        self._clock += 1
        outcome, last_obs = self._transition(actions), None
        ended = outcome.ended
        if self.truncate:
            obs = self._observe(self._no_agents) if outcome.last is None else outcome.last
            last_obs = torch.where(ended[:, None, None], obs, self._empty_obs())
        first = ended if outcome.begins is None else outcome.begins
        self._start_episodes(first)
        return self._make_step(outcome, first, last_obs)

    def _make_step(self, outcome: Outcome, first: Tensor, last_obs: Tensor | None) -> Step:
        return Step(
            obs=self._observe(first),
            reward=outcome.reward.float(),
            terminated=self._no_agents if self.truncate else outcome.ended,
            truncated=outcome.ended if self.truncate else self._no_agents,
            first=first,
            valid=self._all_agents if outcome.valid is None else outcome.valid,
            trial=self._no_agents if outcome.trial is None else outcome.trial,
            last_obs=last_obs,
        )

    def _empty_obs(self) -> UInt8[Tensor, "A M 3"]:
        return tokens.empty(self.agents, self.spec.obs_shape[0], self._agent.device)

    def _randint(self, limit: int, which: int = 0, of: int = 1) -> Int[Tensor, " A"]:
        """Draw an integer in [0, limit) per agent: draw number `which` of the `of` draws of this step."""
        return rng.randint(limit, self.seed, rng.STREAM_WORLD, self._agent, of * self._clock + which)

    def _draw(self, bounds: tuple[int, int], which: int, of: int) -> Int[Tensor, " A"]:
        """Draw an integer per agent, with both bounds included."""
        return bounds[0] + self._randint(bounds[1] - bounds[0] + 1, which, of)

    def _last(self, views: UInt8[Tensor, "N M 3"]) -> UInt8[Tensor, "A M 3"] | None:
        """Draw final observations, for worlds that show a random view at each step.

        This step's regular draw is used by the next episode; used twice, it would leak the next observation.
        """
        if not self.truncate:
            return None
        # Negative counters, which the clock never reaches.
        return views[rng.randint(len(views), self.seed, rng.STREAM_WORLD, self._agent, -1 - self._clock)]

    def _rows(self, rows: list[list[list[int]]]) -> UInt8[Tensor, "N M 3"]:
        """Return a table of observations from lists of tokens, padded."""
        M = self.spec.obs_shape[0]
        full = [[*row, *[[tokens.PADDING] * 3] * (M - len(row))] for row in rows]
        return torch.tensor(full, device=self._agent.device).to(torch.uint8)


def as_range(key: str, value: IntRange, least: int) -> tuple[int, int]:
    """Return the bounds of a number or range."""
    low, high = (value, value) if isinstance(value, int) else value
    if not least <= low <= high:
        raise ConfigError(
            f"world.{key}={value}: give a number from {least} on or a range such as {least + 4}..{least + 9}."
        )
    return low, high


def require(key: str, value: int, low: int, high: int) -> int:
    """Require a number within bounds, and return it."""
    if not low <= value <= high:
        raise ConfigError(f"world.{key}={value}: give a number from {low} to {high}.")
    return value
