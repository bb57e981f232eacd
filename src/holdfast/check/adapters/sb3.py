"""Adapter of sb3-contrib policies: trained by `RecurrentPPO`, evaluated by `evaluate_policy`."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import gymnasium
import numpy as np
import torch

from holdfast.check.adapters.base import Outputs, PolicyAdapter, RolloutAndReplay, end_all_episodes, import_library
from holdfast.check.adapters.generic import random_obs
from holdfast.check.compare import State
from holdfast.check.script import Script, StepBatch
from holdfast.errors import ConfigError, ContractError, error_text
from holdfast.rng import isolated_rng
from holdfast.trust import require_trust_to_unpickle
from holdfast.types import Bool, Float, Shaped, Tensor

import_sb3 = partial(import_library, library="sb3-contrib", extra="sb3")
POLICIES = "sb3_contrib.common.recurrent.policies"
AGENT_STRIDE = 1000
"""Step `t` of agent `a` is marked as `1000 * a + t` in the library's buffer."""


class SB3(PolicyAdapter):
    """A `RecurrentActorCriticPolicy`, run by sb3-contrib's `RecurrentPPO`.

    Its outputs are values and the log-probabilities of scripted actions; only sampling is replaced.
    """

    module: Any

    def __init__(self, policy: Any) -> None:
        policy = _policy_of(policy)
        if not isinstance(policy, import_sb3(POLICIES).RecurrentActorCriticPolicy):
            raise ConfigError(
                f"SB3 checks a RecurrentPPO or its RecurrentActorCriticPolicy, not {type(policy).__name__}."
            )
        if not isinstance(policy.action_space, gymnasium.spaces.Discrete | gymnasium.spaces.Box):
            raise ConfigError(f"SB3 needs a Discrete or Box action space, not {policy.action_space}.")
        self.module, space = policy, policy.action_space
        self._draw = random_obs(policy.observation_space, policy)
        self.actions = int(space.n) if isinstance(space, gymnasium.spaces.Discrete) else 5

    @classmethod
    def fits(cls, policy: Any) -> bool:
        """Whether it is a `RecurrentActorCriticPolicy`."""
        # Such a policy exists only if its library is imported; others must not import it.
        library = sys.modules.get(POLICIES)
        return library is not None and isinstance(_policy_of(policy), library.RecurrentActorCriticPolicy)

    def random_obs(self, size: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draw from the observation space, in the dtype of the library's buffer."""
        obs = self._draw(size, generator)
        return obs.byte() if self.module.observation_space.dtype == np.uint8 else obs

    def initial(self, rows: int) -> State:
        """Make zeros for actor and critic, as `RecurrentPPO` does."""
        weights = self.module.lstm_actor.weight_hh_l0
        if weights.dtype != torch.float32:
            raise ContractError("sb3 converts every observation to float32.")
        layers, _, hidden = self.module.lstm_hidden_state_shape
        pi, vf = (tuple(weights.new_zeros(layers, rows, hidden) for _ in range(2)) for _ in range(2))
        return import_sb3("sb3_contrib.common.recurrent.type_aliases").RNNStates(pi, vf)

    def act(self, step: StepBatch, state: State) -> tuple[Outputs, State]:
        """Call the policy as `collect_rollouts` does."""
        with patch.object(self.module.action_dist, "sample", lambda: self._actions(step)):
            _, values, log_prob, after = self.module(step.obs, state, step.first.float())
        return {"values": values[:, 0], "log_prob": log_prob}, after

    def replay(self, batch: StepBatch, state: State) -> Outputs:
        """Call the policy as `train` does, with sequences flattened."""
        rows, steps = batch.batch
        values, log_prob, _ = self.module.evaluate_actions(
            batch.obs.flatten(0, 1), self._actions(batch).flatten(0, 1), state, batch.first.flatten().float()
        )
        return {"values": values.reshape(rows, steps), "log_prob": log_prob.reshape(rows, steps)}

    def value(self, step: StepBatch, state: State) -> Outputs:
        """Compute the bootstrap value as `collect_rollouts` does, from the critic's state."""
        return {"values": self.module.predict_values(step.obs, state.vf, step.first.float())[:, 0]}

    def rollout_and_replay(self, script: Script) -> RolloutAndReplay:
        """Let `RecurrentPPO` learn from the script at learning rate 0, and record its outputs."""
        policy, agents = self.module, script.agents
        length = script.steps // self.rollouts
        # RecurrentPPO calls a policy class once; this function returns the policy under test.
        trainer = import_sb3("sb3_contrib").RecurrentPPO(
            lambda *_, **__: policy,
            _vec_env(policy, script),
            learning_rate=0.0,
            n_steps=length,
            batch_size=agents * length // self.segments,
            n_epochs=1,
            normalize_advantage=False,
            device="cpu",
        )
        trainer.set_logger(import_sb3("stable_baselines3.common.logger").Logger(None, []))
        # A missing output stays NaN, which breaks every law.
        missing = torch.full((agents, script.steps, 2), torch.nan)
        log, buffer = _OutputLog(missing, missing.clone()), trainer.rollout_buffer
        actions = iter(self._actions(script).unbind(1))
        with (
            torch.enable_grad(),
            # The buffer draws from NumPy's global generator where to split minibatches.
            isolated_rng(0),
            patch.object(policy.action_dist, "sample", lambda: next(actions)),
            patch.object(buffer, "get", log.wrap_get(buffer.get)),
            patch.object(policy, "evaluate_actions", log.wrap_evaluate_actions(policy.evaluate_actions)),
        ):
            trainer.learn(script.steps * agents, callback=_callback(log), log_interval=None)
        policy.optimizer.zero_grad()
        return RolloutAndReplay(log.rollout, log.replay)

    def evaluate(self, script: Script) -> Float[Tensor, "A N K"]:
        """Let `evaluate_policy` play the script, up to its last step, where every episode ends.

        An evaluation computes no values: that column is zero.
        """
        script, episodes = end_all_episodes(script)
        outputs, original = [], self.module.get_distribution

        def get_distribution(*arguments: Any) -> Any:
            distribution, state = original(*arguments)
            log_prob = distribution.log_prob(self._actions(script.at(len(outputs))))
            outputs.append(torch.stack([torch.zeros_like(log_prob), log_prob], dim=-1))
            return distribution, state

        evaluate_policy = import_sb3("stable_baselines3.common.evaluation").evaluate_policy
        with patch.object(self.module, "get_distribution", get_distribution):
            evaluate_policy(self.module, _vec_env(self.module, script), n_eval_episodes=episodes, warn=False)
        return torch.stack(outputs, dim=1)

    def evaluated_steps(self, script: Script) -> Bool[Tensor, "A N1"]:
        """Leave out agents that have finished their episodes: `evaluate_policy` keeps resetting them."""
        ended = script.terminated | script.truncated
        ended[:, -1] = True
        return ended.cumsum(1) < ended.sum(1).min()

    def _actions(self, batch: StepBatch) -> Shaped[Tensor, "*batch _"] | Shaped[Tensor, "*batch"]:
        """Convert the script's actions to the action space."""
        space = self.module.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            return batch.action
        share = batch.action.float() / float(cast("int", self.actions))
        return share[..., None].expand(*share.shape, int(np.prod(space.shape)))


def _policy_of(policy: Any) -> Any:
    """Return the policy of a `RecurrentPPO`, or a policy as it is."""
    library = sys.modules.get("sb3_contrib")
    return policy.policy if library is not None and isinstance(policy, library.RecurrentPPO) else policy


def load_recurrent_ppo(path: Path) -> Any:
    """Load a `RecurrentPPO` that was saved to a zip, which runs code of that file."""
    if not path.exists():
        raise ConfigError(f"{path} does not exist; give the zip that RecurrentPPO.save wrote.")
    require_trust_to_unpickle(path)
    try:
        return import_sb3("sb3_contrib").RecurrentPPO.load(path, device="cpu")
    except Exception as error:
        raise ConfigError(f"{path} cannot be loaded as a RecurrentPPO: {error_text(error, 300)}") from error


@dataclass
class _OutputLog:
    """Outputs of rollouts and updates, sorted by agent and step: `[A,N,K]`."""

    rollout: Float[Tensor, "A N K"]
    replay: Float[Tensor, "A N K"]
    past: int = 0
    """Steps of earlier rollouts."""
    minibatch: Any = None
    """The minibatch of the current gradient step."""

    def close_rollout(self, buffer: Any) -> None:
        """Copy the outputs of a rollout, and mark every step in the buffer."""
        steps, agents = buffer.values.shape
        until = slice(self.past, self.past + steps)
        for column, outputs in enumerate((buffer.values, buffer.log_probs)):
            self.rollout[:, until, column] = torch.from_numpy(outputs.T.copy())
        buffer.advantages[:] = np.arange(agents) * AGENT_STRIDE + np.arange(steps)[:, None] + self.past
        self.past += steps

    def wrap_get(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Wrap `buffer.get` so that the current minibatch is known."""

        def get(*arguments: Any) -> Iterator[Any]:
            for minibatch in original(*arguments):
                self.minibatch = minibatch
                yield minibatch

        return get

    def wrap_evaluate_actions(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `policy.evaluate_actions` to record its outputs, without padding."""

        def evaluate_actions(*arguments: Any) -> Any:
            values, log_prob, entropy = original(*arguments)
            real = self.minibatch.mask > 1e-8
            mark = self.minibatch.advantages[real].long()
            with torch.no_grad():
                outputs = torch.stack([values.flatten(), log_prob], dim=-1)[real]
                self.replay[mark // AGENT_STRIDE, mark % AGENT_STRIDE] = outputs
            return values, log_prob, entropy

        return evaluate_actions


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """One agent's steps of a script, whatever its actions."""

    def __init__(self, script: Script, agent: int, spaces: tuple[Any, Any]) -> None:
        self.observation_space, self.action_space = spaces
        self._reset_obs, self._obs = (obs[agent].numpy() for obs in (script.obs, script.changed(script.first).obs))
        self._ended = script.first[agent].tolist()
        self._truncated = (script.truncated & ~script.terminated)[agent].tolist()
        self._clock = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Return the observation that starts the episode."""
        return self._reset_obs[self._clock], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Advance one step; the last observation of an episode differs from the next one's first."""
        self._clock += 1
        ended, truncated = self._ended[self._clock], self._truncated[self._clock]
        return self._obs[self._clock], 1.0, ended and not truncated, ended and truncated, {}


def _vec_env(policy: Any, script: Script) -> Any:
    """Make the library's `DummyVecEnv` with an environment for each agent."""
    spaces = (policy.observation_space, policy.action_space)
    makers = [lambda agent=agent: ScriptedEnv(script, agent, spaces) for agent in range(script.agents)]
    return import_sb3("stable_baselines3.common.vec_env").DummyVecEnv(makers)


def _callback(log: _OutputLog) -> Any:
    base = import_sb3("stable_baselines3.common.callbacks").BaseCallback

    class RolloutCallback(base):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_end(self) -> None:
            log.close_rollout(self.model.rollout_buffer)

    return RolloutCallback()
