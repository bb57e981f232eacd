"""Adapter of recurrent models of rsl_rl, an actor or a critic, as its PPO calls them."""

import sys
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict

from holdfast.check.adapters.base import Outputs, PolicyAdapter, import_library
from holdfast.check.compare import State
from holdfast.check.script import StepBatch
from holdfast.types import Float, Tensor

MODELS = "rsl_rl.models"


class RslRl(PolicyAdapter):
    """An `RNNModel` of rsl_rl: stepped, reset by `reset(dones)`, and replayed from padded trajectories.

    An actor's outputs are its distribution and the log-probabilities of scripted actions, a critic's its values.
    """

    module: Any

    def __init__(self, model: Any) -> None:
        self.module, distribution = model, model.distribution
        count = 1 if distribution is None else int(distribution.output_dim)
        self.actions = spaces.Box(-1, 1, (count,))

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it is a recurrent model of rsl_rl."""
        # Such a model exists only if its library is imported; others must not import it.
        library = sys.modules.get(MODELS)
        return library is not None and isinstance(policy, library.RNNModel)

    def random_obs(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw the observation groups that the model reads, concatenated."""
        weight = next(self.module.parameters())
        return torch.randn(*size, self.module.obs_dim, generator=generator, dtype=weight.dtype)

    def initial(self, rows: int) -> State:
        """Make zeros, which the library's storage has for a model that has not acted."""
        rnn = self.module.rnn.rnn
        zeros = next(rnn.parameters()).new_zeros(rnn.num_layers, rows, rnn.hidden_size)
        return (zeros, zeros.clone()) if rnn.mode == "LSTM" else zeros

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Reset where the step before ended an episode, then act as `PPO.act` does."""
        model = self.module
        model.reset(hidden_state=_copied(state))
        model.reset(step.first.long())
        outputs = self._outputs(model, self._split(step.obs), step.action)
        after = model.get_hidden_state()
        model.reset()
        return outputs, after

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Replay a segment as `PPO.update` does: the storage cuts and pads its trajectories."""
        rows, steps = batch.batch
        obs = self._split(batch.obs.transpose(0, 1))
        storage = import_library("rsl_rl.storage", library="rsl-rl-lib", extra="rsl-rl").RolloutStorage(
            "rl", rows, steps, obs[0], list(batch.action.shape[2:])
        )
        ended = torch.cat([batch.first[:, 1:], torch.zeros_like(batch.first[:, :1])], dim=1)
        storage.observations, storage.dones = obs, ended.T[..., None].byte()
        storage.distribution_params = ()
        storage.saved_hidden_state_a = [self._stored(leaf, batch) for leaf in _leaves(state)]
        minibatch = next(storage.recurrent_mini_batch_generator(1, 1))
        action, recurrent = batch.action.transpose(0, 1), minibatch.hidden_states[0]
        # The model drops the time axis of a single step.
        action = action.squeeze(0) if steps == 1 else action
        outputs = self._outputs(
            self.module, minibatch.observations, action, masks=minibatch.masks, hidden_state=recurrent
        )
        if steps == 1:
            outputs = {name: leaf.unsqueeze(0) for name, leaf in outputs.items()}
        return {name: leaf.transpose(0, 1) for name, leaf in outputs.items()}

    def value(self, step: StepBatch, state: State) -> Outputs:
        """Compute the bootstrap value as `PPO.compute_returns` does, which restores the state."""
        model = self.module
        model.reset(hidden_state=_copied(state))
        model.reset(step.first.long())
        before = model.get_hidden_state()
        outputs = self._outputs(model, self._split(step.obs), step.action)
        model.reset(hidden_state=before)
        model.reset()
        return outputs

    @staticmethod
    def _outputs(model: Any, obs: TensorDict, action: Tensor, **replayed: Any) -> Outputs:
        if model.distribution is None:
            return {"values": model(obs, **replayed).squeeze(-1)}
        model(obs, stochastic_output=True, **replayed)
        names = [f"parameter_{number}" for number in range(len(model.output_distribution_params))]
        log_prob = model.get_output_log_prob(action.to(obs.device))
        return {"log_prob": log_prob, **dict(zip(names, model.output_distribution_params, strict=True))}

    def _split(self, obs: Float[Tensor, "*batch D"]) -> TensorDict:
        """Distribute the columns over the model's groups, which it concatenates again."""
        groups = list(self.module.obs_groups)
        sizes = [obs.shape[-1] - len(groups) + 1] + [1] * (len(groups) - 1)
        parts = dict(zip(groups, obs.split(sizes, -1), strict=True))
        return TensorDict(parts, batch_size=obs.shape[:-1])

    @staticmethod
    def _stored(leaf: Float[Tensor, "L B H"], batch: StepBatch) -> Float[Tensor, "T L B H"]:
        """Lay out a state as the storage does: that before each step, zeros where an episode starts."""
        stored = leaf.new_zeros(batch.batch[1], *leaf.shape)
        entry = torch.where(batch.first[:, :1], 0.0, leaf)
        return torch.cat([entry[None], stored[1:]])


def _leaves(state: State) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def _copied(state: State) -> State:
    """Copy a state: the library clears it in place."""
    leaves = tuple(leaf.clone() for leaf in _leaves(state))
    return leaves if isinstance(state, tuple) else leaves[0]
