"""A hand-written policy on LSTMWrapper."""

import torch
from torch import nn

from holdfast import LSTMWrapper


class NewLSTMPolicy(LSTMWrapper):
    """Encoder, managed LSTM state, one linear head."""

    def __init__(self, spec, hidden_size=16, num_layers=2, **memory):
        super().__init__(12, hidden_size, num_layers, **memory)
        self.encoder = nn.Linear(spec.obs_shape[0], 12)
        self.head = nn.Linear(hidden_size, len(spec.action_names) + 1)

    def forward(self, td, state=None, action=None):
        observations = td["env_obs"]
        device = observations.device
        B = observations.shape[0]
        TT = observations.shape[1] if td.batch_dims == 2 else 1
        hidden = torch.tanh(self.encoder(observations.to(self.encoder.weight.dtype)))
        hidden = hidden.reshape(B, TT, -1).transpose(0, 1)

        # Get properly managed LSTM state
        lstm_h, lstm_c, env_id = self._manage_lstm_state(td, B, TT, device)
        lstm_state = (lstm_h, lstm_c)

        # Forward through LSTM
        lstm_output, (new_h, new_c) = self.lstm(hidden, lstm_state)

        # Store with automatic detachment
        self._store_lstm_state(new_h, new_c, env_id)

        out = self.head(lstm_output.transpose(0, 1)).reshape(*td.batch_size, -1)
        log_probs = torch.log_softmax(out[..., :-1], dim=-1)
        if action is None:
            action = td["actions"] = torch.distributions.Categorical(logits=log_probs).sample()
        else:
            td["entropy"] = -(log_probs.exp() * log_probs).sum(-1)
        td["act_log_prob"] = log_probs.gather(-1, action[..., None])[..., 0]
        td["values"], td["full_log_probs"] = out[..., -1], log_probs
        return td
