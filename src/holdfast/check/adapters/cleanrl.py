"""Adapter of CleanRL-style agents: `get_action_and_value(x, lstm_state, done, action)`, flattened."""

from typing import Any

import torch
from gymnasium import spaces
from torch import nn

from holdfast.check.adapters.base import Outputs, PolicyAdapter, has_methods
from holdfast.check.adapters.generic import ObsShape, random_obs
from holdfast.check.compare import State
from holdfast.check.script import StepBatch
from holdfast.errors import ConfigError
from holdfast.types import Tensor


class CleanRL(PolicyAdapter):
    """An agent as CleanRL's recurrent PPO scripts use it.

    The rollout calls it with one step of all environments; the update with the rollout of some environments,
    flattened with time first, and their state at the start of the rollout.
    """

    rollouts, segments = 4, 1
    """A segment is a whole rollout, and the state is carried from one to the next."""

    def __init__(self, agent: Any, obs: ObsShape = None, actions: int | spaces.Box = 1) -> None:
        self.module, self.actions = agent, actions
        self._draw = random_obs(obs, agent)

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it has the methods of a CleanRL agent."""
        return has_methods(policy, "get_states", "get_action_and_value")

    def initial(self, rows: int) -> State:
        """Make zeros as the scripts do: a pair for an LSTM, one tensor for a GRU or RNN."""
        core = next((layer for layer in self.module.modules() if isinstance(layer, nn.RNNBase)), None)
        if core is None:
            raise ConfigError(
                "A CleanRL-style agent needs an nn.LSTM or nn.GRU, and this one has none; "
                "use holdfast.check.adapters.Functions(module, ...)."
            )
        weight = next(core.parameters())
        zeros = torch.zeros(core.num_layers, rows, core.hidden_size, dtype=weight.dtype)
        return (zeros, zeros.clone()) if core.mode == "LSTM" else zeros

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call it with one step of all environments."""
        return self._call(step.obs, state, step.first, step.action)

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
        outputs, state = self._call(x, state, done, action)
        return {name: leaf.unflatten(0, (T, B)).transpose(0, 1) for name, leaf in outputs.items()}, state

    def _call(self, x: Tensor, state: State, done: Tensor, action: Tensor) -> tuple[Outputs, State]:
        # The scripts store `done` as floats: 1.0 - done must work.
        result = self.module.get_action_and_value(x, state, done.to(torch.get_default_dtype()), action)
        _, log_prob, entropy, value, state = result
        outputs = {"value": value, "logprob": log_prob, "entropy": entropy}
        return {name: leaf.reshape(len(x)) for name, leaf in outputs.items()}, state
