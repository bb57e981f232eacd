"""A recurrent agent in the style of CleanRL, for vectors: what the check takes without a change.

    laws = holdfast.check(Agent())

The agent keeps no state: it is given `(hidden, cell)`, each `[L,B,H]`, and the flags `done` that came with
what it sees, and hands the new state back. Many steps are laid behind each other, `[T*B,...]`, time first.
"""

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

State = tuple[Tensor, Tensor]


class Agent(nn.Module):
    """An encoder, an LSTM, and two heads: what to do, and what it is worth."""

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
        """Go through all steps one by one; where an episode begins, forget, then look."""
        batch = lstm_state[0].shape[1]
        hidden = self.network(x).reshape(-1, batch, self.lstm.input_size)
        found = []
        for seen, begins in zip(hidden, done.reshape(-1, batch), strict=True):
            kept = (1.0 - begins.to(seen.dtype)).reshape(1, -1, 1)
            out, lstm_state = self.lstm(seen[None], (kept * lstm_state[0], kept * lstm_state[1]))
            found.append(out)
        return torch.cat(found).flatten(0, 1), lstm_state

    def get_value(self, x: Tensor, lstm_state: State, done: Tensor) -> Tensor:
        """Say what a step is worth; the state is left as it was."""
        hidden, _ = self.get_states(x, lstm_state, done)
        return self.critic(hidden)

    def get_action_and_value(
        self, x: Tensor, lstm_state: State, done: Tensor, action: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, State]:
        """Draw an action or judge one: action, log-probability, entropy, value, state."""
        hidden, lstm_state = self.get_states(x, lstm_state, done)
        choice = Categorical(logits=self.actor(hidden))
        if action is None:
            action = choice.sample()
        return action, choice.log_prob(action), choice.entropy(), self.critic(hidden), lstm_state
