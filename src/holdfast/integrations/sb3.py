"""Policies for sb3-contrib's `RecurrentPPO` whose LSTM runs a sequence with resets in one call.

    from holdfast.integrations.sb3 import MlpLstmPolicy
    RecurrentPPO(MlpLstmPolicy, "CartPole-v1").learn(100_000)

Weights, their names and results are those of sb3-contrib's policies of the same names.
"""

from typing import Any, final

import torch
from torch import nn

from holdfast.errors import ConfigError
from holdfast.install import install_command
from holdfast.nn import LSTM
from holdfast.types import Tensor

try:
    from sb3_contrib.common.recurrent import policies  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ConfigError(f"{error}; holdfast.integrations.sb3 needs sb3-contrib: {install_command('sb3')}.") from error

__all__ = ["CnnLstmPolicy", "MlpLstmPolicy", "MultiInputLstmPolicy"]


class _OneCallPerSequence(policies.RecurrentActorCriticPolicy):
    """A policy of sb3-contrib with our LSTM in place of torch's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lstm_actor = _with_weights_of(self.lstm_actor)
        if self.lstm_critic is not None:
            self.lstm_critic = _with_weights_of(self.lstm_critic)

    @staticmethod
    def _process_sequence(
        features: Tensor, lstm_states: tuple[Tensor, Tensor], episode_starts: Tensor, lstm: nn.Module
    ) -> tuple[Tensor, Any]:
        """Run sequences `[n_seq * length, features]`, sequence by sequence, from their states."""
        rows = lstm_states[0].shape[1]
        features_BTD, first_BT = (flat.unflatten(0, (rows, -1)) for flat in (features, episode_starts))
        y_TBH, lstm_states = lstm(features_BTD.transpose(0, 1), lstm_states, first_BT.T)
        return y_TBH.transpose(0, 1).flatten(0, 1), lstm_states


def _with_weights_of(lstm: nn.Module) -> Any:
    """Return our LSTM with the same parameters: the optimizer has them already."""
    names = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")
    # Initial weights are drawn and replaced; sampled actions must not depend on that.
    with torch.random.fork_rng(devices=[]):
        ours = LSTM(**{name: getattr(lstm, name) for name in names})
    for name, weight in lstm.named_parameters():
        setattr(ours, name, weight)
    return ours


@final
class MlpLstmPolicy(_OneCallPerSequence):
    """`sb3_contrib`'s `MlpLstmPolicy` with our LSTM."""


@final
class CnnLstmPolicy(_OneCallPerSequence, policies.RecurrentActorCriticCnnPolicy):
    """`sb3_contrib`'s `CnnLstmPolicy` with our LSTM."""


@final
class MultiInputLstmPolicy(_OneCallPerSequence, policies.RecurrentMultiInputActorCriticPolicy):
    """`sb3_contrib`'s `MultiInputLstmPolicy` with our LSTM."""
