"""PolicyAdapter: the interface through which the check calls any recurrent policy."""

import importlib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from gymnasium import spaces
from torch import nn

from holdfast.check.compare import State, clone_state
from holdfast.check.held_memory import copy_policy
from holdfast.check.script import Draw, Script, StepBatch
from holdfast.errors import ConfigError
from holdfast.install import install_command
from holdfast.memory.episode_resets import ClearOn
from holdfast.types import Bool, Float, Tensor
from holdfast.worlds import World

if TYPE_CHECKING:
    from holdfast.check.context import CheckContext
    from holdfast.check.results import Measurement

SINGLE_STEPS = 40
"""Steps run one at a time after segments were run in one call."""
Outputs = Mapping[str, Tensor]
"""Outputs by name: `[A]` or `[A,k]` for a step, `[B,T]` or `[B,T,k]` for a segment."""


@dataclass(frozen=True)
class RolloutAndReplay:
    """Outputs of the same steps in rollouts and in replays as an update does them."""

    rollout: Float[Tensor, "A N K"]
    replay: Float[Tensor, "A N K"]


class PolicyAdapter(ABC):
    """A recurrent policy under test: makes an initial state, acts one step, replays a segment.

    `act` must be what its rollouts call and `replay` what its updates call. An adapter of a library with
    its own collector and trainer overrides `rollout_and_replay`.
    """

    module: Any
    """The torch module with the weights; the check copies, converts and modifies it."""
    _draw: Draw
    """Draws observations, for adapters that do not override `random_obs`."""
    rollouts: int = 2
    segments: int = 2
    """Rollouts per script, and segments per rollout."""
    carries_state: bool = True
    """Whether rollouts continue from the state of the previous one; if not, from the initial state."""
    clear_on: ClearOn = "episode"
    actions: int | spaces.MultiDiscrete | spaces.Box = 1
    """Number of discrete actions, or the action space."""
    sees_first: bool = True
    """Whether the policy or its trainer gets episode starts; if not, `clear` is not applicable."""
    must_clear: bool = True
    """Whether a policy that gets no episode starts fails `clear`; if not, its caller is trusted to clear the state."""
    reads_segments: bool = True
    """Whether one call reads a segment; if not, a replay is a chain of single steps."""
    value_clears: bool = False
    """Whether `value` is told of episode starts, as the next step is."""
    notes: tuple[str, ...] = ()
    """Assumptions about the policy, for the report."""
    handles_invalid: ClassVar[bool] = False
    """Whether the policy gets `valid`."""
    rollout_has_grad: bool = False
    """Whether rollouts run with gradients on, so that states must be detached by the policy."""

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether `check` chooses this adapter for a policy."""
        return False

    @classmethod
    def make(cls, policy: Any, world: World | None, **options: Any) -> "PolicyAdapter":
        """Build the adapter; `world` is the one the policy was built for, if any."""
        constructor: Any = cls
        if world is not None:
            accepted = inspect.signature(constructor).parameters
            from_world = {
                "obs": world.spec.observation_space,
                "actions": world.spec.action or len(world.spec.action_names),
            }
            options = {name: value for name, value in from_world.items() if name in accepted} | options
        return constructor(policy, **options)

    def random_obs(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw observations: `[*size, ...]`."""
        return self._draw(size, generator)

    def random_actions(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw actions."""
        if isinstance(self.actions, int):
            return torch.randint(self.actions, size, generator=generator)
        if isinstance(self.actions, spaces.MultiDiscrete):
            columns = [torch.randint(n, size, generator=generator) for n in self.actions.nvec.tolist()]
            return torch.stack(columns, dim=-1)
        return torch.randn(*size, *self.actions.shape, generator=generator)

    @abstractmethod
    def initial(self, rows: int) -> State:
        """Make the initial state of `rows` agents."""

    @abstractmethod
    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Act one step `[A]`; return the outputs and the next state."""

    @abstractmethod
    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Replay a segment `[B,T]` from its entry state, as an update does."""

    def value(self, step: StepBatch, state: State) -> Outputs:
        """Compute the bootstrap value of a step."""
        return self.act(step, state)[0]

    def act_from_none(self, step: StepBatch) -> Outputs | None:
        """Act with None as the state, as at the start of a rollout; None if that is not possible."""
        return None

    def act_with_action(self, step: StepBatch, state: State) -> Outputs | None:
        """Act one step whose action is given; None if acting knows no actions."""
        return None

    def rollout_and_replay(self, script: Script) -> RolloutAndReplay:
        """Run a script in rollouts, and replay every segment from its entry state."""
        horizon = script.steps // (self.rollouts * self.segments)
        outputs, replayed = [], []
        state = self.initial(script.agents)
        for rollout in range(self.rollouts):
            state = state if self.carries_state else self.initial(script.agents)
            entries = []
            for t in range(rollout * self.segments * horizon, (rollout + 1) * self.segments * horizon):
                if t % horizon == 0:
                    entries.append((t, clone_state(state)))
                step_outputs, state = self.act(script.at(t), state)
                outputs.append(flat(step_outputs, 1))
            with torch.enable_grad():
                segments = [self.replay(script.step_batches(t, t + horizon), entry) for t, entry in entries]
            replayed += [flat(segment, 2) for segment in segments]
        return RolloutAndReplay(torch.stack(outputs, dim=1), torch.cat(replayed, dim=1))

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Run a script as an evaluation does."""
        state, outputs = self.initial(script.agents), []
        for t in range(script.steps):
            step_outputs, state = self.act(script.at(t), state)
            outputs.append(flat(step_outputs, 1))
        return torch.stack(outputs, dim=1)

    def evaluated_steps(self, script: Script) -> Bool[Tensor, "A N1"]:
        """Return the steps that count in an evaluation; the laws ignore the others."""
        return torch.ones_like(script.first)

    def advance(self, batch: StepBatch, state: State) -> State:
        """Run a segment `[B,T]` and return the state after it; in one call, if possible."""
        for t in range(batch.batch[1]):
            _, state = self.act(batch[:, t], state)
        return state

    def run_steps(self, script: Script, state: State, steps: int) -> State:
        """Run `steps` steps, repeating the script: segments first, then single steps."""
        horizon = script.steps // (self.rollouts * self.segments)
        for done in range(0, steps - SINGLE_STEPS, horizon):
            start = done % (script.steps - horizon)
            state = self.advance(script.step_batches(start, start + horizon), state)
        for t in range(SINGLE_STEPS):
            _, state = self.act(script.at(t % script.steps), state)
        return state

    def memory_modules(self) -> Sequence[nn.Module]:
        """Return the recurrent modules that read `[B,T,D]`, to measure gradients of integer observations."""
        return ()

    def extra_measurements(self, law: str, context: "CheckContext") -> list["Measurement"]:
        """Measure what only this kind of policy has."""
        return []

    def in_precision(self, dtype: torch.dtype) -> "PolicyAdapter":
        """Copy the adapter, in training mode, on the CPU, in a dtype."""
        adapter = copy_policy(self)
        adapter.module = adapter.module.cpu().to(dtype).train()
        return adapter

    def call(self, weights: dict[str, Tensor], name: str, *arguments: Any) -> Any:
        """Call a method by name with other weights in the module."""
        parameters = {f"module.{key}": leaf for key, leaf in weights.items()}
        return torch.func.functional_call(_MethodCall(self), parameters, (name, *arguments))


class _MethodCall(nn.Module):
    """Forwards to a method of an adapter, so that `functional_call` can replace its weights."""

    def __init__(self, adapter: PolicyAdapter) -> None:
        super().__init__()
        self.module = adapter.module
        self._adapter = [adapter]

    def forward(self, name: str, *arguments: Any) -> Any:
        return getattr(self._adapter[0], name)(*arguments)


def flat(outputs: Outputs, batch_dims: int) -> Float[Tensor, "*batch K"]:
    """Concatenate all outputs along the last axis."""
    leaves = [leaf.flatten(batch_dims) if leaf.dim() > batch_dims else leaf[..., None] for leaf in outputs.values()]
    return torch.cat(leaves, dim=-1)


def end_all_episodes(script: Script) -> tuple[Script, int]:
    """End every episode at the last step, for an evaluation; also return how many episodes it may ask for."""
    terminated, first = script.terminated.clone(), script.first.clone()
    terminated[:, -1] = ~script.truncated[:, -1]
    first[:, -1] = True
    episodes = int((terminated | script.truncated).sum(1).min()) * script.agents
    return replace(script, terminated=terminated, first=first), episodes


def has_methods(policy: Any, *names: str) -> bool:
    """Whether a policy is a torch module with these methods."""
    return isinstance(policy, nn.Module) and all(callable(getattr(policy, name, None)) for name in names)


def import_library(name: str, *, library: str, extra: str) -> Any:
    """Import a module of another library, or raise an error that names the extra."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"Checking such policies needs {library}: {install_command(extra)}.") from error
