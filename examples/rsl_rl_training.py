"""rsl_rl trains our model: a point on a line is driven to 0; its speed is hidden."""

import sys

import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict


class Point(VecEnv):
    """Points that are pushed; the reward is what is left of the distance to 0."""

    def __init__(self, num_envs: int = 64) -> None:
        self.num_envs, self.num_actions, self.max_episode_length = num_envs, 1, 50
        self.device, self.cfg = torch.device("cpu"), {}
        self.episode_length_buf = torch.zeros(num_envs, dtype=torch.long)
        self.place, self.speed = torch.rand(num_envs) * 2 - 1, torch.zeros(num_envs)

    def get_observations(self) -> TensorDict:
        """Return places."""
        return TensorDict({"policy": self.place[:, None].clone()}, batch_size=[self.num_envs])

    def step(self, actions: torch.Tensor) -> tuple[TensorDict, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Push, and restart after 50 steps."""
        self.speed = self.speed + 0.1 * actions[:, 0].clamp(-1, 1)
        self.place = (self.place + 0.2 * self.speed).clamp(-2, 2)
        reward = 1 - self.place.abs()
        self.episode_length_buf = self.episode_length_buf + 1
        done = self.episode_length_buf >= self.max_episode_length
        self.episode_length_buf = torch.where(done, 0, self.episode_length_buf)
        self.place = torch.where(done, torch.rand(self.num_envs) * 2 - 1, self.place)
        self.speed = torch.where(done, 0.0, self.speed)
        return self.get_observations(), reward, done, {"time_outs": done}


MODEL = {
    "class_name": "holdfast.integrations.rsl_rl:RNNModel",  # the only line that differs
    "hidden_dims": [32],
    "rnn_type": "lstm",
    "rnn_hidden_dim": 32,
}
CONFIG = {
    "num_steps_per_env": 25,
    "save_interval": 1000,
    "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
    "actor": {**MODEL, "distribution_cfg": {"class_name": "GaussianDistribution", "init_std": 0.5}},
    "critic": dict(MODEL),
    "algorithm": {"class_name": "PPO", "entropy_coef": 0.0},
}

if __name__ == "__main__":
    torch.manual_seed(0)
    runner = OnPolicyRunner(Point(), CONFIG, log_dir=sys.argv[2] if len(sys.argv) > 2 else None)
    runner.learn(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
    env, policy = Point(), runner.get_inference_policy()
    policy.reset()
    with torch.inference_mode():
        rewards = [env.step(policy(env.get_observations()))[1] for _ in range(49)]
    print(f"mean reward of a step: {torch.stack(rewards).mean():.2f}")
