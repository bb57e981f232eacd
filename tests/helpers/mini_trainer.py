"""A recurrent PPO in CleanRL's style that obeys the laws of a trainer; its lines are replaced to break them."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

T, UPDATES, EPOCHS, GAMMA, LAMBDA = 12, 2, 2, 0.99, 0.95


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.Tanh())
        self.lstm = nn.LSTM(12, 10)
        self.actor, self.critic = nn.Linear(10, 3), nn.Linear(10, 1)

    def unroll(self, obs, first, state):
        """Run T steps of B rows, [T,B,...], clearing where an episode starts."""
        x, outputs = self.encoder(obs), []
        for x_t, first_t in zip(x, first, strict=True):
            state = tuple(part * (1 - first_t)[None, :, None] for part in state)
            y, state = self.lstm(x_t[None], state)
            outputs.append(y[0])
        return torch.stack(outputs), state

    def heads(self, y):
        return Categorical(logits=self.actor(y)), self.critic(y)[..., 0]


@torch.no_grad()
def value_of(agent, obs, first, state):
    y, _ = agent.unroll(obs[None], first[None], state)
    return agent.heads(y[0])[1]


def gae(rewards, values, next_values, ended):
    advantages, last = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(T)):
        delta = rewards[t] + GAMMA * next_values[t] - values[t]
        last = delta + GAMMA * LAMBDA * (1 - ended[t]) * last
        advantages[t] = last
    return advantages


def train(envs):
    torch.manual_seed(0)
    agent = Agent()
    optimizer = torch.optim.SGD(agent.parameters(), lr=0.0)
    B = envs.num_envs
    obs, _ = envs.reset()
    obs, first = torch.tensor(obs), torch.ones(B)
    state = (torch.zeros(1, B, 10), torch.zeros(1, B, 10))
    for _ in range(UPDATES):
        all_obs, firsts, actions = torch.zeros(T, B, 8), torch.zeros(T, B), torch.zeros(T, B)
        rewards, values, next_values = torch.zeros(T, B), torch.zeros(T, B), torch.zeros(T, B)
        log_probs, ended = torch.zeros(T, B), torch.zeros(T, B)
        entry = state
        for t in range(T):
            all_obs[t], firsts[t] = obs, first
            with torch.no_grad():
                y, state = agent.unroll(obs[None], first[None], state)
                policy, values[t] = agent.heads(y[0])
                actions[t] = policy.sample()
                log_probs[t] = policy.log_prob(actions[t])
            obs, reward, terminated, truncated, info = envs.step(actions[t].numpy())
            obs, rewards[t] = torch.tensor(obs), torch.tensor(reward)
            terminated, truncated = torch.tensor(terminated), torch.tensor(truncated)
            first = ended[t] = (terminated | truncated).float()
            next_values[t] = 0.0
            if bool(truncated.any()):
                final = torch.tensor(np.stack([x if x is not None else np.zeros(8, "f") for x in info["final_obs"]]))
                boot = value_of(agent, final, torch.zeros(B), state)
                next_values[t] = torch.where(truncated & ~terminated, boot, 0.0)
        following = torch.cat([values[1:], value_of(agent, obs, first, state)[None]])
        next_values = torch.where(ended.bool(), next_values, following)
        advantages = gae(rewards, values, next_values, ended)
        returns = advantages + values
        for _ in range(EPOCHS):
            for rows in torch.randperm(B).split(B // 2):
                start = tuple(part[:, rows] for part in entry)
                y, _ = agent.unroll(all_obs[:, rows], firsts[:, rows], start)
                policy, value = agent.heads(y)
                ratio = (policy.log_prob(actions[:, rows]) - log_probs[:, rows]).exp()
                a = advantages[:, rows]
                a = (a - a.mean()) / (a.std() + 1e-8)
                policy_loss = -torch.min(a * ratio, a * ratio.clamp(0.8, 1.2)).mean()
                loss = policy_loss + 0.5 * 0.5 * ((value - returns[:, rows]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
