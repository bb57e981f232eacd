"""PPO of tianshou with its `Recurrent` networks: rollouts carry states, updates read stacked observations."""

from typing import Any

import numpy as np
import torch
from tianshou.algorithm import PPO  # pyright: ignore[reportMissingImports]
from tianshou.algorithm.modelfree.reinforce import (  # pyright: ignore[reportMissingImports]
    ProbabilisticActorPolicy,
)
from tianshou.algorithm.optim import AdamOptimizerFactory  # pyright: ignore[reportMissingImports]
from tianshou.data import Collector, VectorReplayBuffer  # pyright: ignore[reportMissingImports]
from tianshou.env.venvs import BaseVectorEnv  # pyright: ignore[reportMissingImports]
from tianshou.utils.net.common import Recurrent  # pyright: ignore[reportMissingImports]
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic  # pyright: ignore[reportMissingImports]
from tianshou.utils.torch_utils import policy_within_training_step  # pyright: ignore[reportMissingImports]
from torch.distributions import Categorical

STEPS, UPDATES, STACK, HIDDEN = 16, 3, 8, 16


class ScriptedTianshouEnvs(BaseVectorEnv):
    """The Gymnasium environments, as tianshou calls them: it resets each environment after its last observation."""

    def __init__(self, envs: Any) -> None:
        self.envs, self.env_num, self.is_async, self.is_closed = envs, envs.num_envs, False, False
        self.ready_id, self.waiting_id = list(range(self.env_num)), []
        self.next_obs = np.zeros(0)

    def get_env_attr(self, key: str, id: Any = None) -> list[Any]:
        """Return the space of each environment."""
        spaces = {"action_space": "single_action_space", "observation_space": "single_observation_space"}
        return [getattr(self.envs, spaces[key])] * self.env_num

    def reset(self, env_id: Any = None, **options: Any) -> tuple[np.ndarray, np.ndarray]:
        """Start all environments, or return the first observations that the step has drawn."""
        if env_id is None:
            self.next_obs = self.envs.reset()[0]
        rows = range(self.env_num) if env_id is None else env_id
        return self.next_obs[list(rows)].copy(), np.array([{} for _ in rows])

    def step(self, action: Any, id: Any = None) -> Any:
        """Take one step in all environments; ended ones return their final observations."""
        self.next_obs, rewards, terminated, truncated, info = self.envs.step(action)
        obs = self.next_obs.copy()
        for env in np.flatnonzero(terminated | truncated):
            obs[env] = info["final_obs"][env]
        return obs, rewards, terminated, truncated, np.array([{"env_id": env} for env in range(self.env_num)])

    def close(self) -> None:
        """Do nothing."""


def train(envs: Any) -> None:
    """Train with learning rate 0."""
    torch.manual_seed(0)
    sizes = {"layer_num": 1, "state_shape": envs.single_observation_space.shape, "hidden_layer_size": HIDDEN}
    actor, critic = (Recurrent(action_shape=HIDDEN, **sizes) for _ in range(2))
    logits = DiscreteActor(preprocess_net=actor, action_shape=int(envs.single_action_space.n), softmax_output=False)
    policy = ProbabilisticActorPolicy(
        actor=logits,
        dist_fn=lambda logits: Categorical(logits=logits),
        action_space=envs.single_action_space,
        observation_space=envs.single_observation_space,
        action_scaling=False,
    )
    algorithm = PPO(
        policy=policy,
        critic=DiscreteCritic(preprocess_net=critic),
        optim=AdamOptimizerFactory(lr=0.0),
        gamma=0.99,
        gae_lambda=0.95,
        vf_coef=1.0,
        ent_coef=0.0,
    )
    size = STEPS * envs.num_envs
    buffer = VectorReplayBuffer(size, envs.num_envs, stack_num=STACK)
    collector = Collector(algorithm, ScriptedTianshouEnvs(envs), buffer)
    collector.reset()
    for _ in range(UPDATES):
        collector.collect(n_step=size)
        with policy_within_training_step(policy):
            algorithm.update(buffer, batch_size=size // 2, repeat=2)
        collector.reset_buffer(keep_statistics=True)
