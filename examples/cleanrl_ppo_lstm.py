"""PPO with an LSTM in CleanRL's style, on CartPole without velocities: one call of `holdfast.nn` runs a rollout."""

import sys

import gymnasium as gym
import torch
from cleanrl_parts import FastAgent
from gymnasium.vector import AutoresetMode, SyncVectorEnv

ENVS, STEPS, EPOCHS, GAMMA, LAMBDA = 16, 128, 6, 0.99, 0.95


def train(updates: int, seed: int = 1) -> list[float]:
    """Train, and return the mean length of the episodes that ended in each rollout."""
    torch.manual_seed(seed)
    envs = SyncVectorEnv([lambda: gym.make("CartPole-v1")] * ENVS, autoreset_mode=AutoresetMode.SAME_STEP)
    agent = FastAgent(inputs=2, actions=2)
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3, eps=1e-5)
    positions = [0, 2]
    next_obs = torch.from_numpy(envs.reset(seed=seed)[0][:, positions])
    next_done, state, lengths = torch.ones(ENVS), (torch.zeros(1, ENVS, 64),) * 2, []
    for update in range(updates):
        entry, steps, ends = state, [], 0
        for _ in range(STEPS):
            with torch.no_grad():
                action, log_prob, _, value, state = agent.get_action_and_value(next_obs, state, next_done)
            obs, reward, terminated, truncated, _ = envs.step(action.numpy())
            steps.append((next_obs, next_done, action, log_prob, value[:, 0], torch.from_numpy(reward).float() / 20))
            next_obs, next_done = torch.from_numpy(obs[:, positions]), torch.from_numpy(terminated | truncated).float()
            ends += int(next_done.sum())
        lengths.append(ENVS * STEPS / max(ends, 1))
        print(f"update {update + 1}: {lengths[-1]:.0f} steps an episode", flush=True)
        obs, done, action, log_prob, value, reward = map(torch.stack, zip(*steps, strict=True))
        with torch.no_grad():
            next_value = agent.get_value(next_obs, state, next_done)[:, 0]
        advantage, last = torch.zeros_like(reward), torch.zeros(ENVS)
        for t in reversed(range(STEPS)):
            ended, after = (next_done, next_value) if t == STEPS - 1 else (done[t + 1], value[t + 1])
            last = reward[t] + (1 - ended) * GAMMA * (after + LAMBDA * last) - value[t]
            advantage[t] = last
        for _ in range(EPOCHS):
            for rows in torch.randperm(ENVS).split(ENVS // 4):
                x, first, taken, old, adv = (
                    each[:, rows].flatten(0, 1) for each in (obs, done, action, log_prob, advantage)
                )
                entry_of_rows = (entry[0][:, rows], entry[1][:, rows])
                _, new, entropy, new_value, _ = agent.get_action_and_value(x, entry_of_rows, first, taken)
                ratio, adv_norm = (new - old).exp(), (adv - adv.mean()) / (adv.std() + 1e-8)
                policy_loss = torch.max(-adv_norm * ratio, -adv_norm * ratio.clamp(0.8, 1.2)).mean()
                target = adv + value[:, rows].flatten()
                loss = policy_loss + 0.5 * (new_value[:, 0] - target).square().mean() - 0.01 * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
    return lengths


if __name__ == "__main__":
    train(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
