"""RecurrentPPO of sb3-contrib."""

from typing import Any

from sb3_contrib import RecurrentPPO  # pyright: ignore[reportMissingImports]


def train(envs: Any) -> None:
    """Train an `MlpLstmPolicy` with learning rate 0."""
    small = {"lstm_hidden_size": 16, "net_arch": [16]}
    model = RecurrentPPO(
        "MlpLstmPolicy",
        envs,
        learning_rate=0.0,
        n_steps=16,
        batch_size=64,
        n_epochs=2,
        gamma=0.99,
        gae_lambda=0.95,
        policy_kwargs=small,
        seed=0,
        device="cpu",
    )
    model.learn(total_timesteps=3 * 16 * envs.num_envs)
