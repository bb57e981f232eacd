"""PufferLib-style policies under test: `forward_eval` and `forward` with a dictionary of state."""

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import nn

from holdfast.check.script import Moments, Script
from holdfast.check.subject import Answer, Life, Subject, flat
from holdfast.check.subjects.sight import Sight, imagine
from holdfast.check.tree import State
from holdfast.errors import ConfigError
from holdfast.shapes import Tensor

KEYS = ("lstm_h", "lstm_c")


@runtime_checkable
class PufferPolicy(Protocol):
    """What a policy of PufferLib has."""

    def forward_eval(self, observations: Tensor, state: dict[str, Any]) -> Any:
        """Act one step; the new state is written into the dictionary."""
        ...

    def forward(self, observations: Tensor, state: dict[str, Any]) -> Any:
        """Go over segments `[B,T,...]`."""
        ...


class Puffer(Subject):
    """A policy as PufferLib 3's trainer uses it.

    The rollout calls `forward_eval` with a dictionary that carries the state and the flags of the
    last step; the update calls `forward` on segments. That trainer wipes all states before a rollout
    and gives the update none (`trainer="pufferlib"`); a fork that carries and stores states is
    checked with `trainer="stored"`: its updates get the entry state, and `done` for every step.
    """

    rollouts, segments = 4, 1

    def __init__(
        self,
        policy: Any,
        obs: Sight = None,
        actions: int = 1,
        trainer: Literal["pufferlib", "stored"] = "pufferlib",
    ) -> None:
        self.module, self.actions, self.trainer = policy, actions, trainer
        self._draw = imagine(obs, policy)

    def imagine(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw what it was said to see."""
        return self._draw(size, generator)

    def initial(self, rows: int) -> State:
        """Make zeros `[rows, hidden]` as the trainer does."""
        cores = (layer for layer in self.module.modules() if isinstance(layer, nn.RNNBase | nn.RNNCellBase))
        core = next(cores, None)
        if core is None:
            raise ConfigError("A PufferLib-style policy keeps its memory in an nn.LSTM; this one has none.")
        zeros = torch.zeros(rows, core.hidden_size, dtype=next(core.parameters()).dtype)
        return {key: zeros.clone() for key in KEYS}

    def act(self, moment: Moments, state: State) -> tuple[Answer, State]:
        """Call `forward_eval` as its rollout does."""
        ended = moment.terminated | moment.truncated
        lent = {
            **state,
            "done": ended.to(moment.obs.dtype),
            "reward": torch.zeros(len(ended)),
            "mask": moment.valid,
        }
        said = self.module.forward_eval(moment.obs, lent)
        return _named(said, 1), {key: lent[key] for key in KEYS}

    def replay(self, moments: Moments, state: State) -> Answer:
        """Call `forward` as its update does."""
        lent: dict[str, Any] = {"action": moments.action, **dict.fromkeys(KEYS)}
        if self.trainer == "stored":
            lent |= {**state, "done": moments.first.to(moments.obs.dtype)}
        return _named(self.module.forward(moments.obs, lent), 2, moments.batch)

    @torch.no_grad()
    def live(self, script: Script) -> Life:
        """Wipe all states before each rollout, as PufferLib's trainer does."""
        if self.trainer == "stored":
            return super().live(script)
        horizon = script.steps // self.rollouts
        lived, replayed = [], []
        for start in range(0, script.steps, horizon):
            state = self.initial(script.agents)
            for t in range(start, start + horizon):
                said, state = self.act(script.at(t), state)
                lived.append(flat(said, 1))
            moments = script.moments(start, start + horizon)
            replayed.append(flat(self.replay(moments, self.initial(script.agents)), 2))
        return Life(torch.stack(lived, dim=1), torch.cat(replayed, dim=1))


def _named(said: Any, batch_dims: int, batch: torch.Size | None = None) -> Answer:
    logits, values = said
    if batch is not None:
        logits, values = logits.reshape(*batch, -1), values.reshape(batch)
    return {"values": values.reshape(logits.shape[:batch_dims]), "logits": logits}
