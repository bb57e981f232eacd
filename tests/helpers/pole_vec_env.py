"""A pole on a cart with rsl_rl's VecEnv interface, on tensors; the actor sees positions without velocities."""

import torch
from tensordict import TensorDict

from holdfast import rng

LENGTH = 200


class PoleVecEnv:
    """Balance a pole with forces in [-1, 1]; episodes run out of time after 200 steps.

    The observations are a TensorDict: `policy` has the positions of cart and pole, `critic` their velocities too.
    """

    num_actions = 1
    cfg: dict = {}  # noqa: RUF012

    def __init__(self, num_envs, seed=0, device="cpu", *, gives_final_obs=True, length=LENGTH):
        self.num_envs, self.seed, self.device = num_envs, seed, torch.device(device)
        self.max_episode_length, self.gives_final_obs = length, gives_final_obs
        self.reset()

    def reset(self):
        self.episode = torch.zeros(self.num_envs, dtype=torch.long, device=self.device)
        self.episode_length_buf = torch.zeros_like(self.episode)
        self.state = self._initial()
        return self.get_observations(), {}

    def _initial(self):
        agent = torch.arange(self.num_envs, device=self.device)
        draws = [rng.uniform(self.seed, 77, agent, 4 * self.episode + number) for number in range(4)]
        return (2 * torch.stack(draws, -1) - 1) * torch.tensor([0.2, 0.3, 0.1, 0.6], device=self.device)

    def get_observations(self):
        scaled = self.state / torch.tensor([2.4, 2.0, 0.21, 2.0], device=self.device)
        return TensorDict({"policy": scaled[:, ::2], "critic": scaled}, batch_size=[self.num_envs])

    def step(self, actions):
        _, v, angle, speed = self.state.unbind(-1)
        force = 10 * actions[:, 0].clamp(-1, 1)
        push = (force + 0.05 * speed.square() * angle.sin()) / 1.1
        turn = (9.8 * angle.sin() - angle.cos() * push) / (0.5 * (4 / 3 - 0.1 * angle.cos().square() / 1.1))
        pull = push - 0.05 * turn * angle.cos() / 1.1
        change = torch.stack([v, pull, speed, turn], -1)
        self.state = self.state + 0.02 * change
        self.episode_length_buf = self.episode_length_buf + 1
        failed = (self.state[:, 0].abs() > 2.4) | (self.state[:, 2].abs() > 0.21)
        time_outs = ~failed & (self.episode_length_buf >= self.max_episode_length)
        extras = {"time_outs": time_outs}
        if self.gives_final_obs:
            extras["final_obs"] = self.get_observations()
        dones = failed | time_outs
        self.episode = self.episode + dones
        self.episode_length_buf = torch.where(dones, 0, self.episode_length_buf)
        self.state = torch.where(dones[:, None], self._initial(), self.state)
        return self.get_observations(), torch.ones(self.num_envs, device=self.device), dones.long(), extras


def lossy_pole(num_envs, seed=0, length=LENGTH):
    """Make poles whose last observations are lost, as in Isaac Lab."""
    return PoleVecEnv(num_envs, seed, gives_final_obs=False, length=length)


def eight_poles():
    """Make a number of poles that the caller cannot choose."""
    return PoleVecEnv(8)


def bare_pole(num_envs):
    """Make poles with one tensor of positions as observation, and without time limits."""
    env = PoleVecEnv(num_envs, length=10**9)

    class Bare:
        num_envs, num_actions, device = env.num_envs, 1, env.device

        def get_observations(self):
            return env.get_observations()["policy"]

        def step(self, actions):
            obs, reward, dones, _ = env.step(actions)
            return obs["policy"], reward, dones, {}

    return Bare()
