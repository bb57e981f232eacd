"""A recurrent agent in the style of CleanRL, for vector observations; `check` takes it without a change.

    laws = holdfast.check(Agent())

The agent keeps no state: it takes `(hidden, cell)`, each `[L,B,H]`, with the `done` flags of the
observations, and returns the new state. Batches of many steps are flat, `[T*B,...]`, time first.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

State = tuple[Tensor, Tensor]


class Agent(nn.Module):
    """An encoder, an LSTM, an actor and a critic."""

    def __init__(self, inputs: int = 4, actions: int = 3, hidden: int = 64) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh())
        self.lstm = nn.LSTM(hidden, hidden)
        for name, weight in self.lstm.named_parameters():
            if "bias" in name:
                nn.init.constant_(weight, 0)
            else:
                nn.init.orthogonal_(weight, 1.0)
        self.actor = nn.Linear(hidden, actions)
        self.critic = nn.Linear(hidden, 1)

    def get_states(self, x: Tensor, lstm_state: State, done: Tensor) -> tuple[Tensor, State]:
        """Run the LSTM step by step, clearing the state where an episode starts."""
        batch = lstm_state[0].shape[1]
        hidden = self.network(x).reshape(-1, batch, self.lstm.input_size)
        outputs = []
        for step, first in zip(hidden, done.reshape(-1, batch), strict=True):
            keep = (1.0 - first.to(step.dtype)).reshape(1, -1, 1)
            output, lstm_state = self.lstm(step[None], (keep * lstm_state[0], keep * lstm_state[1]))
            outputs.append(output)
        return torch.cat(outputs).flatten(0, 1), lstm_state

    def get_value(self, x: Tensor, lstm_state: State, done: Tensor) -> Tensor:
        """Return the value of each step; the new state is discarded."""
        hidden, _ = self.get_states(x, lstm_state, done)
        return self.critic(hidden)

    def get_action_and_value(
        self, x: Tensor, lstm_state: State, done: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
        """Sample an action or evaluate one: action, log-probability, entropy, value, state."""
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        distribution = Categorical(logits=self.actor(hidden))
        if action is None:
            action = distribution.sample()
        return action, distribution.log_prob(action), distribution.entropy(), self.critic(hidden), lstm_state
