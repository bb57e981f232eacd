"""DiscreteA2CAgent (PPO) of rl_games with an LSTM."""

import tempfile
from typing import Any

import torch
from rl_games.common import env_configurations, vecenv  # pyright: ignore[reportMissingImports]
from rl_games.torch_runner import Runner  # pyright: ignore[reportMissingImports]

STEPS, UPDATES = 16, 3
NETWORK = {
    "name": "actor_critic",
    "separate": False,
    "space": {"discrete": None},
    "mlp": {"units": [16], "activation": "tanh", "initializer": {"name": "default"}, "regularizer": {"name": "None"}},
    "rnn": {"name": "lstm", "units": 16, "layers": 1, "before_mlp": False},
}
CONFIG = {
    "name": "scripted",
    "env_name": "scripted",
    "device": "cpu",
    "device_name": "cpu",
    "reward_shaper": {"scale_value": 1.0},
    "normalize_advantage": True,
    "normalize_input": False,
    "normalize_value": False,
    "gamma": 0.99,
    "tau": 0.95,
    "learning_rate": 0.0,
    "lr_schedule": None,
    "grad_norm": 1.0,
    "entropy_coef": 0.0,
    "critic_coef": 1.0,
    "truncate_grads": False,
    "e_clip": 0.2,
    "clip_value": False,
    "horizon_length": STEPS,
    "seq_length": 8,
    "mini_epochs": 2,
    "ppo": True,
    "value_bootstrap": True,
    "max_epochs": UPDATES,
    "print_stats": False,
    "score_to_win": 1e9,
    "save_best_after": 1000,
    "save_frequency": 0,
}


class ScriptedRlGames(vecenv.IVecEnv):
    """The Gymnasium environments, as rl_games calls them."""

    def __init__(self, envs: Any) -> None:
        self.envs = envs

    def get_env_info(self) -> dict[str, Any]:
        """Return the spaces."""
        return {"observation_space": self.envs.single_observation_space, "action_space": self.envs.single_action_space}

    def reset(self) -> torch.Tensor:
        """Start all environments."""
        return torch.as_tensor(self.envs.reset()[0])

    def step(self, actions: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Take one step; `time_outs` are episodes that were truncated and not terminated."""
        obs, reward, terminated, truncated, _ = self.envs.step(actions)
        infos = {"time_outs": torch.as_tensor(truncated & ~terminated)}
        ended = torch.as_tensor(terminated | truncated)
        return torch.as_tensor(obs), torch.as_tensor(reward).float(), ended, infos


def train(envs: Any) -> None:
    """Train with learning rate 0."""
    vecenv.register("SCRIPTED", lambda config_name, num_actors, **options: ScriptedRlGames(envs))
    env_configurations.register("scripted", {"vecenv_type": "SCRIPTED", "env_creator": lambda **options: envs})
    sizes = {"num_actors": envs.num_envs, "minibatch_size": STEPS * envs.num_envs // 2}
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner()
        config = {**CONFIG, **sizes, "train_dir": folder}
        algorithm = {"algo": {"name": "a2c_discrete"}, "model": {"name": "discrete_a2c"}, "network": NETWORK}
        runner.load({"params": {"seed": 0, **algorithm, "config": config}})
        runner.run({"train": True})
