"""PPO of rsl_rl with recurrent models, in the loop of its on-policy runner."""

from typing import Any

import torch
from rsl_rl.algorithms import PPO  # pyright: ignore[reportMissingImports]
from rsl_rl.models import RNNModel  # pyright: ignore[reportMissingImports]
from rsl_rl.storage import RolloutStorage  # pyright: ignore[reportMissingImports]

STEPS, UPDATES = 16, 3


def train(envs: Any) -> None:
    """Train an LSTM actor and an LSTM critic with learning rate 0."""
    torch.manual_seed(0)
    obs, groups = envs.get_observations(), {"actor": ["policy"], "critic": ["policy"]}
    sizes = {"hidden_dims": [16], "rnn_type": "lstm", "rnn_hidden_dim": 16, "rnn_num_layers": 1}
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0}
    actor = RNNModel(obs, groups, "actor", envs.num_actions, distribution_cfg=noise, **sizes)
    critic = RNNModel(obs, groups, "critic", 1, **sizes)
    storage = RolloutStorage("rl", envs.num_envs, STEPS, obs, [envs.num_actions], "cpu")
    algorithm = PPO(
        actor,
        critic,
        storage,
        num_learning_epochs=2,
        num_mini_batches=2,
        gamma=0.99,
        lam=0.95,
        learning_rate=0.0,
        schedule="fixed",
        device="cpu",
    )
    for _ in range(UPDATES):
        with torch.inference_mode():
            for _ in range(STEPS):
                obs, rewards, dones, extras = envs.step(algorithm.act(obs))
                algorithm.process_env_step(obs, rewards, dones, extras)
            algorithm.compute_returns(obs)
        algorithm.update()
