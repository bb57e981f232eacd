"""CleanRL-style agents under test: `get_action_and_value(x, lstm_state, done, action)`, flat."""

from typing import Any, Protocol, runtime_checkable

import torch
from gymnasium import spaces
from torch import nn

from holdfast.check.script import Moments
from holdfast.check.subject import Answer, Subject
from holdfast.check.subjects.sight import Sight, imagine
from holdfast.check.tree import State
from holdfast.errors import ConfigError
from holdfast.shapes import Tensor


@runtime_checkable
class CleanRLAgent(Protocol):
    """What an agent of CleanRL's recurrent scripts has."""

    def get_states(self, x: Tensor, lstm_state: Any, done: Tensor) -> Any:
        """Read steps and return features and the state."""
        ...

    def get_action_and_value(
        self, x: Tensor, lstm_state: Any, done: Tensor, action: Tensor | None = None
    ) -> Any:
        """Return action, log-probability, entropy, value and the state."""
        ...


class CleanRL(Subject):
    """An agent as CleanRL's recurrent PPO scripts use it.

    The rollout gives it a step of all environments; the update gives it the rollout of some
    environments, flattened with time first, and the state those environments began it with.
    """

    rollouts, segments = 4, 1
    """Their segments are whole rollouts, and the state is carried from one to the next."""

    def __init__(self, agent: Any, obs: Sight = None, actions: int | spaces.Box = 1) -> None:
        self.module, self.actions = agent, actions
        self._draw = imagine(obs, agent)

    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw what it was said to see."""
        return self._draw(size, generator)

    def initial(self, rows: int) -> State:
        """Make zeros as the scripts do: a pair for an LSTM, one tensor for others."""
        core = next((layer for layer in self.module.modules() if isinstance(layer, nn.RNNBase)), None)
        if core is None:
            raise ConfigError(
                "A CleanRL-style agent keeps its memory in an nn.LSTM or nn.GRU, and this one has none; "
                "use Callables."
            )
        weight = next(core.parameters())
        zeros = torch.zeros(core.num_layers, rows, core.hidden_size, dtype=weight.dtype)
        return (zeros, zeros.clone()) if isinstance(core, nn.LSTM) else zeros

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Give it one step of all environments."""
        return self._ask(moment.obs, state, moment.first, moment.action)

    def replay(self, moments: Moments, state: State) -> Answer:
        """Give it a rollout, flattened with time first."""
        B, T = moments.batch
        said, _ = self._ask(*_flattened(moments, state))
        return {name: leaf.unflatten(0, (T, B)).transpose(0, 1) for name, leaf in said.items()}

    def over(self, moments: Moments, state: State) -> State:
        """Give it a rollout, and keep the state after it."""
        return self._ask(*_flattened(moments, state))[1]

    def value(self, moment: Moments, state: State) -> Answer:
        """Ask for the bootstrap value."""
        said = self.module.get_value(moment.obs, state, moment.first.to(moment.obs.dtype))
        return {"value": said.reshape(len(moment.first))}

    def _ask(self, x: Tensor, state: State, done: Tensor, action: Tensor) -> tuple[Answer, State]:
        # Their scripts keep `done` as numbers: 1.0 - done must work.
        asked = self.module.get_action_and_value(x, state, done.to(torch.get_default_dtype()), action)
        _, log_prob, entropy, value, state = asked
        said = {"value": value, "logprob": log_prob, "entropy": entropy}
        return {name: leaf.reshape(len(x)) for name, leaf in said.items()}, state


def _flattened(moments: Moments, state: State) -> tuple[Tensor, State, Tensor, Tensor]:
    """Lay a segment out as their updates do: one row a step, time first."""
    x, done, action = (
        each.transpose(0, 1).flatten(0, 1) for each in (moments.obs, moments.first, moments.action)
    )
    return x, state, done, action
