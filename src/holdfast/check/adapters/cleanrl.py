"""Adapter of CleanRL-style agents: `get_action_and_value(x, lstm_state, done, action)`, flattened."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from gymnasium import spaces
from torch.distributions import Bernoulli, Categorical, Normal

from holdfast.check.adapters.base import Outputs, PolicyAdapter, has_methods
from holdfast.check.adapters.generic import ObsShape, random_obs
from holdfast.check.adapters.initial_states import initial_from_method, recurrent_layers, zero_state
from holdfast.check.compare import State, clone_state, register_dataclasses
from holdfast.check.script import StepBatch
from holdfast.errors import ConfigError
from holdfast.rng import isolated_rng
from holdfast.types import Tensor


class CleanRL(PolicyAdapter):
    """An agent as CleanRL's recurrent PPO scripts use it.

    The rollout calls it with one step of all environments; the update with the rollout of some environments,
    flattened with time first, and their state at the start of the rollout.
    """

    rollouts, segments = 4, 1
    """A segment is a whole rollout, and the state is carried from one to the next."""
    value_clears = True

    def __init__(self, agent: Any, obs: ObsShape = None, actions: int | spaces.Box = 1) -> None:
        self.module, self.actions = agent, actions
        self._draw = random_obs(obs, agent)

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it has the methods of a CleanRL agent."""
        return has_methods(policy, "get_value", "get_action_and_value")

    def initial(self, rows: int) -> State:
        """Call the agent's own method, or make zeros as the scripts do: a pair for an LSTM, one tensor for a GRU."""
        state = initial_from_method(self.module, rows)
        if state is not None:
            return register_dataclasses(state)
        cores = recurrent_layers(self.module)
        if not cores:
            raise ConfigError(
                "A CleanRL-style agent needs an nn.LSTM or nn.GRU, or a method get_initial_state(rows), and this one "
                "has neither; use holdfast.check.adapters.Functions(module, ...)."
            )
        states = [zero_state(core, rows) for core in cores]
        return states[0] if self._one_state else tuple(states)

    @cached_property
    def _one_state(self) -> bool:
        """Whether the state is that of one recurrent layer, and not a tuple of all of them."""
        cores = recurrent_layers(self.module)
        if len(cores) < 2:
            return True
        weight = next(self.module.parameters())
        obs = self.random_obs((2,), torch.Generator().manual_seed(0)).to(weight)
        try:
            with torch.no_grad(), isolated_rng(0):
                self.module.get_value(obs, zero_state(cores[0], 2), torch.zeros(2, dtype=weight.dtype))
        except Exception:
            return False
        return True

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call it with one step of all environments and no action, as the rollout does; the script's is sampled."""
        before = clone_state(state)
        with sampling(step.action):
            chosen, outputs, after = self._call(step.obs, state, step.first, None)
        if not (
            chosen.numel() == step.action.numel() and bool((chosen.reshape(step.action.shape) == step.action).all())
        ):
            # It draws actions in a way of its own, so the script's is evaluated.
            _, evaluated, _ = self._call(step.obs, before, step.first, step.action)
            outputs = {**outputs, "logprob": evaluated["logprob"]}
        return outputs, after

    def act_with_action(self, step: StepBatch, state: State) -> Outputs | None:
        """Call it with one step of all environments and the script's action."""
        return self._call(step.obs, state, step.first, step.action)[1]

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Call it with a rollout."""
        return self._call_rollout(batch, state)[0]

    def advance(self, batch: StepBatch, state: State) -> State:
        """Call it with a rollout and return the state after it."""
        return self._call_rollout(batch, state)[1]

    def value(self, step: StepBatch, state: State) -> Outputs:
        """Compute the bootstrap value."""
        values = self.module.get_value(step.obs, state, step.first.to(step.obs.dtype))
        return {"value": values.reshape(len(step.first))}

    def _call_rollout(self, batch: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call it as CleanRL's updates do: one row per step, flattened with time first."""
        B, T = batch.batch
        x, done, action = (leaf.transpose(0, 1).flatten(0, 1) for leaf in (batch.obs, batch.first, batch.action))
        _, outputs, state = self._call(x, state, done, action)
        return {name: leaf.unflatten(0, (T, B)).transpose(0, 1) for name, leaf in outputs.items()}, state

    def _call(self, x: Tensor, state: State, done: Tensor, action: Tensor | None) -> tuple[Tensor, Outputs, State]:
        # The scripts store `done` as floats: 1.0 - done must work.
        result = self.module.get_action_and_value(x, state, done.to(torch.get_default_dtype()), action)
        chosen, log_prob, entropy, value, state = result
        outputs = {"value": value, "logprob": log_prob, "entropy": entropy}
        return chosen, {name: leaf.reshape(len(x)) for name, leaf in outputs.items()}, register_dataclasses(state)


@contextmanager
def sampling(action: Tensor) -> Iterator[None]:
    """Let distributions of PyTorch draw the given action, where its shape fits."""

    def replacing(original: Any) -> Any:
        def sample(self: Any, sample_shape: Any = ()) -> Tensor:
            drawn = original(self, sample_shape)
            return action.to(drawn.dtype).reshape(drawn.shape) if drawn.shape == action.shape else drawn

        return sample

    with ExitStack() as stack:
        for kind, name in ((Categorical, "sample"), (Normal, "sample"), (Normal, "rsample"), (Bernoulli, "sample")):
            stack.enter_context(patch.object(kind, name, replacing(getattr(kind, name))))
        yield
