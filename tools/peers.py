"""The policies that `check_peers.py` checks: as their libraries mean them, and broken on purpose."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import torch
from sb3_contrib.common.recurrent.buffers import RecurrentRolloutBuffer
from sb3_contrib.common.recurrent.type_aliases import RNNStates
from sb3_contrib.ppo_recurrent.policies import MlpLstmPolicy
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule

from holdfast.check.adapters.base import PolicyAdapter
from holdfast.check.adapters.cleanrl import CleanRL
from holdfast.check.adapters.sb3 import SB3
from holdfast.check.adapters.torchrl import TorchRL

sys.path.insert(0, str(Path(__file__).parent.parent))
from examples.cleanrl_style import Agent

SIGHT, ACTIONS, HIDDEN = 4, 3, 64


@dataclass(frozen=True)
class Entry:
    """A policy to check."""

    name: str
    make: Callable[[], PolicyAdapter]
    description: str
    """What is checked, in a sentence."""
    must: tuple[str, ...] = ()
    """The laws that must break, for what is broken."""
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """What is changed in the library meanwhile."""


# ---- policies as their libraries mean them ---------------------------------------------------------------
def sb3(kind: Any = MlpLstmPolicy, **options: Any) -> PolicyAdapter:
    """Make a policy of sb3-contrib at its own default sizes."""
    sight = gymnasium.spaces.Box(-np.inf, np.inf, (SIGHT,))
    return SB3(kind(sight, gymnasium.spaces.Discrete(ACTIONS), lambda _: 3e-4, **options))


def torchrl(memory: Any, primer: bool = True) -> PolicyAdapter:
    """Make a policy of TorchRL: an encoder, a memory, two heads and the action."""
    policy = TensorDictSequential(
        TensorDictModule(nn.Linear(SIGHT, HIDDEN), ["observation"], ["encoded"]),
        memory,
        TensorDictModule(nn.Linear(HIDDEN, ACTIONS), ["hidden"], ["logits"]),
        TensorDictModule(nn.Linear(HIDDEN, 1), ["hidden"], ["state_value"]),
        TensorDictModule(lambda x: x.argmax(-1, keepdim=True).to(x.dtype), ["logits"], ["action"]),
    )
    return TorchRL(policy, (SIGHT,), primer=primer)


def lstm(kind: Any = LSTMModule, **options: Any) -> Any:
    """Make an `LSTMModule` with the keys that an environment carries."""
    states = ["state_0", "state_1"]
    keys = {"in_keys": ["encoded", *states], "out_keys": ["hidden", *[("next", state) for state in states]]}
    return kind(HIDDEN, HIDDEN, **keys, **options)


def gru(kind: Any = GRUModule, **options: Any) -> Any:
    """Make a `GRUModule` likewise."""
    keys = {"in_keys": ["encoded", "state"], "out_keys": ["hidden", ("next", "state")]}
    return kind(HIDDEN, HIDDEN, **keys, **options)


# ---- the same, broken on purpose -------------------------------------------------------------------------
@contextmanager
def _states_not_stored() -> Iterator[None]:
    own = RecurrentRolloutBuffer.add

    def add(self: Any, *arguments: Any, lstm_states: Any) -> None:
        zeros = tuple(torch.zeros_like(leaf) for leaf in lstm_states.pi)
        own(self, *arguments, lstm_states=RNNStates(zeros, zeros))

    with mock.patch.object(RecurrentRolloutBuffer, "add", add):
        yield


class NeverClears(MlpLstmPolicy):
    """Ignores episode starts."""

    @staticmethod
    def _process_sequence(features: Any, lstm_states: Any, episode_starts: Any, lstm: Any) -> Any:
        never = torch.zeros_like(episode_starts)
        return MlpLstmPolicy._process_sequence(features, lstm_states, never, lstm)


class TrainsFromZeros(LSTMModule):
    """Drops the stored states in recurrent mode."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Drop the states first."""
        if not self.recurrent_mode:
            return super().forward(tensordict)
        return tensordict.update(super().forward(tensordict.exclude(*self.in_keys[1:3])))


class TrainsAcrossStarts(GRUModule):
    """Ignores episode starts in recurrent mode."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Set is_init to false."""
        if not self.recurrent_mode:
            return super().forward(tensordict)
        never = torch.zeros_like(tensordict["is_init"])
        return tensordict.update(super().forward(tensordict.copy().set("is_init", never)).exclude("is_init"))


class Unending(Agent):
    """Ignores episode ends."""

    def get_states(self, x: Tensor, lstm_state: Any, done: Tensor) -> Any:
        """Set done to false."""
        return super().get_states(x, lstm_state, torch.zeros_like(done))


WITH_SCAN = importlib.util.find_spec("hoptorch") is not None
LIBRARIES = [
    Entry(
        "sb3-contrib MlpLstmPolicy",
        sb3,
        "Actor and critic with an LSTM each, default sizes; `RecurrentPPO.learn` runs and trains it.",
    ),
    Entry(
        "sb3-contrib MlpLstmPolicy, shared LSTM",
        lambda: sb3(shared_lstm=True, enable_critic_lstm=False),
        "`shared_lstm=True, enable_critic_lstm=False`: the critic reads the actor's LSTM.",
    ),
    Entry(
        "TorchRL LSTMModule, pad",
        lambda: torchrl(lstm()),
        "Collected by `Collector` with `InitTracker` and the policy's primer; replayed in recurrent mode.",
    ),
    Entry(
        "TorchRL GRUModule, pad",
        lambda: torchrl(gru()),
        "The same with a GRU.",
    ),
    *(
        Entry(
            f"TorchRL {name}, scan",
            lambda make=make: torchrl(make(recurrent_backend="scan")),
            "The same with the scan backend, which keeps rows whole.",
        )
        for name, make in (("LSTMModule", lstm), ("GRUModule", gru))
        if WITH_SCAN
    ),
    Entry(
        "CleanRL-style agent",
        lambda: CleanRL(Agent(SIGHT, ACTIONS), (SIGHT,), actions=ACTIONS),
        "`examples/cleanrl_style.py`, in rollouts and updates laid out as CleanRL's recurrent PPO does.",
    ),
]
BROKEN = [
    Entry(
        "TorchRL LSTMModule, no primer",
        lambda: torchrl(lstm(), primer=False),
        "A real mistake: the environment does not get the recurrent states, so every step of a rollout "
        "starts from zeros while training carries states. TorchRL 0.14 warns that transforms are missing.",
        must=("carry", "replay"),
    ),
    Entry(
        "sb3-contrib, states not stored",
        sb3,
        "Control: the buffer keeps zeros in place of the LSTM states.",
        must=("replay",),
        around=_states_not_stored,
    ),
    Entry(
        "sb3-contrib, never clears",
        lambda: sb3(NeverClears),
        "Control: episode starts are ignored, in rollout, training and play alike.",
        must=("clear",),
    ),
    Entry(
        "TorchRL, trains from zeros",
        lambda: torchrl(lstm(TrainsFromZeros)),
        "Control: stored states are dropped in recurrent mode.",
        must=("replay",),
    ),
    Entry(
        "TorchRL, trains across starts",
        lambda: torchrl(gru(TrainsAcrossStarts)),
        "Control: `is_init` is ignored in recurrent mode.",
        must=("clear", "replay"),
    ),
    Entry(
        "CleanRL-style, never clears",
        lambda: CleanRL(Unending(SIGHT, ACTIONS), (SIGHT,), actions=ACTIONS),
        "Control: `done` is ignored.",
        must=("clear",),
    ),
]
