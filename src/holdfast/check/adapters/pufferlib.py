"""Adapter of PufferLib-style policies: `forward_eval` and `forward` with a dictionary of state."""

from typing import Any, Literal

import torch
from torch import nn

from holdfast.check.adapters.base import Outputs, PolicyAdapter, has_methods
from holdfast.check.adapters.generic import ObsShape, random_obs
from holdfast.check.compare import State
from holdfast.check.script import StepBatch
from holdfast.errors import ConfigError

KEYS = ("lstm_h", "lstm_c")


class Puffer(PolicyAdapter):
    """A policy as PufferLib 3's trainer uses it.

    The rollout calls `forward_eval` with a dictionary of the state and the flags of the last step; the update calls
    `forward` on segments. That trainer zeroes all states before a rollout and passes none to the update
    (`trainer="pufferlib"`). `trainer="stored"` is for forks that carry and store states: the update gets the entry
    state, and `done` for every step.
    """

    rollouts, segments = 4, 1

    def __init__(
        self, policy: Any, obs: ObsShape = None, actions: int = 1, trainer: Literal["pufferlib", "stored"] = "pufferlib"
    ) -> None:
        self.module, self.actions, self.carries_state = policy, actions, trainer == "stored"
        self._draw = random_obs(obs, policy)

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it has the rollout method of a PufferLib policy."""
        return has_methods(policy, "forward_eval")

    def initial(self, rows: int) -> State:
        """Make zeros `[rows, hidden]` as the trainer does."""
        cores = (layer for layer in self.module.modules() if isinstance(layer, nn.RNNBase | nn.RNNCellBase))
        core = next(cores, None)
        if core is None:
            raise ConfigError("A PufferLib-style policy needs an nn.LSTM; this one has none.")
        zeros = torch.zeros(rows, core.hidden_size, dtype=next(core.parameters()).dtype)
        return {key: zeros.clone() for key in KEYS}

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call `forward_eval` as the rollout does."""
        ended = step.terminated | step.truncated
        flags = {"done": ended.to(step.obs.dtype), "reward": torch.zeros(len(ended)), "mask": step.valid}
        buffer = {**state, **flags}
        logits, values = self.module.forward_eval(step.obs, buffer)
        return {"values": values.reshape(len(logits)), "logits": logits}, {key: buffer[key] for key in KEYS}

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Call `forward` as the update does."""
        buffer: dict[str, Any] = {"action": batch.action, **dict.fromkeys(KEYS)}
        if self.carries_state:
            buffer |= {**state, "done": batch.first.to(batch.obs.dtype)}
        logits, values = self.module.forward(batch.obs, buffer)
        return {"values": values.reshape(batch.batch), "logits": logits.reshape(*batch.batch, -1)}
